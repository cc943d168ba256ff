"""Loaded as `sitecustomize` by every interpreter of a conformance run; the same file serves both arms.

Upstream's workers are children of a fork server, so a patch made by a conftest or a pytest plugin never reaches them.

Both arms: what keeps upstream's tests from running on CPU is repaired, and with FP8_DS_CONFORMANCE_PERSISTENCE=none
ZeRO-3 keeps no persistent parameters (the default threshold makes every weight of these tiny models persistent);
the runner leaves the threshold alone for tests that stock fails without it.
Our arm (FP8_DS_FORCE=1): every `deepspeed.initialize` that FP8 can serve gets the "fp8" block, and comparisons forgive
FP8's rounding (rounding.py says what that is).
FP8_DS_CONFORMANCE_ENGINES names the file that gets one JSON line per `initialize` call of rank 0, and one per
comparison, of any rank, that fails as upstream wrote it.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FP8_BLOCK = {"enabled": True, "preset": None, "linear": {"filter_fqns": [], "min_size": 0}}
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zenflow")


def why_not_fp8(config: dict[str, Any]) -> str | None:
    """None if the configuration is one that FP8 accepts, else the key that rules it out (rows of docs on refusals)."""
    zero = config.get("zero_optimization", {})
    bf16 = config.get("bf16", config.get("bfloat16", {}))
    if not (isinstance(bf16, dict) and bf16.get("enabled") is True):
        return "bf16 is off"
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (1, 2, 3):
        return "ZeRO stage 0"
    devices = [(zero.get(key) or {}).get("device") for key in ("offload_param", "offload_optimizer")]
    accumulation = config.get("data_types", {}).get("grad_accum_dtype")
    rules = {
        "offload": zero.get("cpu_offload") or any(device not in ("none", None) for device in devices),
        **{key: zero.get(key) for key in QUANTIZED},
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size", 1) > 1,
        "mics_shard_size": zero.get("mics_shard_size", -1) > 0,
        **{key: config.get(key, {}).get("enabled") for key in ("fp16", "torch_autocast", "hybrid_engine", "amp")},
        "deepcompile": config.get("compile", {}).get("deepcompile"),
        "BF16_Optimizer's path (grad_accum_dtype fp32 with stage 1)": accumulation == "fp32" and zero["stage"] == 1,
    }
    return next((why for why, is_true in rules.items() if is_true), None)


def why_no_layer(model: Any) -> str | None:
    """None if the model has a trainable plain nn.Linear whose weight no other module shares."""
    import torch

    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module in model.modules():
        if type(module) is not torch.nn.Linear or module.weight is None:
            continue
        if owners[id(module.weight)] == 1 and module.weight.requires_grad:
            return None
    return "no plain nn.Linear with a trainable weight of its own"


def record_on_any_rank(line: dict[str, Any]) -> None:
    path = os.environ.get("FP8_DS_CONFORMANCE_ENGINES")
    if path:
        with open(path, "a") as engines:
            engines.write(json.dumps(line) + "\n")


def record(line: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        record_on_any_rank(line)


def wrap_initialize(initialize: Callable[..., Any], force: bool) -> Callable[..., Any]:
    """`initialize` without persistent parameters where asked, and with the "fp8" block if `force` and FP8 can serve."""

    @functools.wraps(initialize)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        key = "config" if kwargs.get("config") is not None else "config_params"
        config = kwargs.get(key)
        if config is None:
            key, config = "config", getattr(kwargs.get("args"), "deepspeed_config", None)
            if config is not None:
                kwargs["args"] = copy.copy(kwargs["args"])
                del kwargs["args"].deepspeed_config
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
            with open(config) as file:
                config = json.load(file)
        if not isinstance(config, dict) or model is None:
            record({"forced": False, "why": "no configuration or no model given"})
            return initialize(*args, **kwargs)
        config = copy.deepcopy(config)
        why = why_not_fp8(config)
        if why is None:
            if os.environ.get("FP8_DS_CONFORMANCE_PERSISTENCE") == "none" and config["zero_optimization"]["stage"] == 3:
                config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
            why = why_no_layer(model)
        if why is None and force:
            config["fp8"] = copy.deepcopy(FP8_BLOCK)
        kwargs[key] = config
        if why is not None or not force:
            record({"forced": False, "why": why or "stock arm"})
            return initialize(*args, **kwargs)
        try:
            result = initialize(*args, **kwargs)
        except Exception as error:
            record({"forced": True, "num_fp8": 0, "error": f"{type(error).__name__}: {error}"[:300]})
            raise
        num_fp8 = sum(hasattr(parameter, "_fp8") for parameter in result[0].module.parameters())
        stage = config["zero_optimization"]["stage"]
        record({"forced": True, "num_fp8": num_fp8, "engine": type(result[0]).__name__, "stage": stage})
        return result

    return wrapped


def after_deepspeed(module: ModuleType) -> None:
    if not hasattr(module.DeepSpeedEngine, "sparse_tensor_module_names"):
        # DeepSpeed 0.19.8 dropped it; the checkpoint tests at hand are older and compare it between two engines.
        module.DeepSpeedEngine.sparse_tensor_module_names = ()
    force = os.environ.get("FP8_DS_FORCE") == "1"
    if force:
        import fp8_ds  # noqa: F401
    module.initialize = wrap_initialize(module.initialize, force)  # type: ignore[attr-defined]


def after_unit_util(module: ModuleType) -> None:
    # Upstream's check wants CUDA and NCCL versions; bf16 on CPU with gloo needs neither.
    module.bf16_required_version_check = lambda accelerator_check=True: True  # type: ignore[attr-defined]


def after_unit_common(module: ModuleType) -> None:
    # Upstream puts the flags on `current_device()`, which DeepSpeed's CPU accelerator answers with a bare rank.
    def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
        if not module.dist.is_initialized():
            return flag
        flags: list[Any] = [None] * module.dist.get_world_size()
        module.torch.distributed.all_gather_object(flags, bool(flag))
        return op(flags)

    module.reduce_boolean_flags = reduce_boolean_flags  # type: ignore[attr-defined]
    if os.environ.get("FP8_DS_FORCE") == "1":
        # Upstream's helpers and tests look both up in torch at each call, so one replacement reaches all of them.
        from fp8_ds_conformance_rounding import forgiving_allclose, forgiving_assert_close

        torch = module.torch
        torch.allclose = forgiving_allclose(torch.allclose, record_on_any_rank)
        torch.testing.assert_close = forgiving_assert_close(torch.testing.assert_close, record_on_any_rank)


def after_ddp(module: ModuleType) -> None:
    # Upstream's DDP baselines pass device_ids=[rank], which torch refuses for modules on CPU.
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(
        self: Any, net: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if all(parameter.device.type == "cpu" for parameter in net.parameters()):
            device_ids = output_device = None
        original(self, net, device_ids, output_device, *args, **kwargs)

    module.DistributedDataParallel.__init__ = __init__


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed": after_deepspeed,
    "unit.common": after_unit_common,
    "unit.util": after_unit_util,
    "torch.nn.parallel.distributed": after_ddp,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs AFTER_IMPORT's function for a module right after its body has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            AFTER_IMPORT[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterImport())
