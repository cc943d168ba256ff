"""Retyping of the ZeRO optimizer that DeepSpeed has built, to a class with our adapter and repairs before its own.

For FP8 states DeepSpeed builds it without dense masters, moments or gradients: it looks its optimizer classes up by
name, and finds a subclass without the state initialisation inside `building`. Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine as engine_module
import deepspeed.runtime.zero.stage3 as stage3_module
import torch
from deepspeed import comm as ds_comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.compat.config import no_release
from fp8_ds.engine.ranks import say
from fp8_ds.errors import UnsupportedError
from fp8_ds.optim.core import virtual_flat
from fp8_ds.optim.zero_adamw import ZeroAdamW
from fp8_ds.zero.release import bucket_size
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12

_HOLDS = (
    "fp8: gradient release saves nothing in this run: with gradient_clipping {} (without the key DeepSpeed takes 1.0, "
    'before 0.19.3 it took 0) and fp8.optimizer.release_clipping "exact" reduced gradients are held until the step. '
    '"delayed_norm" holds none (docs/memory.md).'
)
"""The default: deepspeedai/DeepSpeed v0.19.2 and v0.19.3, deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT."""


_ADAPTERS: dict[type, type] = {DeepSpeedZeroOptimizer: Fp8ZeroStage12, DeepSpeedZeroOptimizer_Stage3: Fp8ZeroStage3}


_DEVICE = "_fp8_device"


class BuildingHost:
    fp8_releases = False


class Building12(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer."""

    @property
    def device(self) -> Any:
        """Device on which DeepSpeed makes its masters: meta, without memory."""
        return "meta"

    @device.setter
    def device(self, value: Any) -> None:
        vars(self)[_DEVICE] = value


class Building3(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3."""

    def initialize_optimizer_states(self) -> None:
        """Do nothing: moments come with the first step, and gradients are not copied to fp32."""

    def _setup_for_real_optimizer(self: Any) -> None:
        """Set up; with gradient release, without a buffer for all gradients and with small buckets."""
        if not self.fp8_releases:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
            return
        copies = 2  # the bucket, and what the reduction concatenates
        self.reduce_bucket_size = min(self.reduce_bucket_size, bucket_size(copies, self.dtype))
        device, self.device = self.device, "meta"
        try:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
        finally:
            self.device = device

    def _create_fp32_partitions(self: Any) -> None:
        device = get_accelerator().current_device_name()
        for numel, ids in zip(
            self.fp16_partitioned_groups_flat_numel, self.fp16_partitioned_groups_flat_id, strict=True
        ):
            flat: Any = virtual_flat(int(numel), device)
            flat.ds_id = f"{ids[0]}_{ids[-1]}"
            self.fp32_partitioned_groups_flat.append(flat)
        for group in self.optimizer.param_groups:
            group["params"] = []


@contextmanager
def building(releases: bool) -> Iterator[None]:
    """Let DeepSpeed build these classes instead of its own inside the block. `releases`: with gradient release."""
    places = (
        (engine_module, "DeepSpeedZeroOptimizer", Building12),
        (stage3_module, "DeepSpeedZeroOptimizer_Stage3", Building3),
    )
    original = [getattr(module, name) for module, name, _ in places]
    attributes = {"fp8_releases": releases}
    for (module, name, mixin), host in zip(places, original, strict=True):
        setattr(module, name, type(f"Building{host.__name__}", (mixin, host), attributes))
    try:
        yield
    finally:
        for (module, name, _), host in zip(places, original, strict=True):
            setattr(module, name, host)


def build_zero(engine: Any, optimizer: Any, build: Callable[[Any], Any]) -> tuple[Any, type]:
    """Build DeepSpeed's ZeRO optimizer over `optimizer`; return it, not retyped yet, and its class in DeepSpeed.

    With FP8 states a ZeroAdamW takes `optimizer` over first, and becomes `engine.basic_optimizer`.

    Raises:
        ConfigError: gradients cannot be released here.
        UnsupportedError: the class cannot be retyped.
    """
    settings = engine.fp8.config.optimizer
    if settings.states == "fp32":
        zero = build(optimizer)
    else:
        engine.basic_optimizer = optimizer = ZeroAdamW(optimizer, seed=settings.seed)
        releases = settings.releases(engine.gradient_clipping())
        if releases:
            check_release(engine)
        elif settings.release:
            say(_HOLDS.format(engine.gradient_clipping()))
        with building(releases):
            zero = build(optimizer)
    host = next((host for host in _ADAPTERS if isinstance(zero, BuildingHost) and isinstance(zero, host)), type(zero))
    if host not in _ADAPTERS:
        raise UnsupportedError(
            f"ZeRO optimizer: expected one of {[h.__name__ for h in _ADAPTERS]}, got {host.__name__}. Remove the "
            'option that selects it, or turn "fp8.enabled" off.'
        )
    return zero, host


def has_no_purpose(engine: Any) -> bool:
    """Whether FP8 would change nothing: fp32 states, bf16 gradients, no FP8 weight on any rank. Collective."""
    config = engine.fp8.config
    if config.optimizer.states != "fp32" or config.zero.reduce_scatter != "bf16":
        return False
    found = torch.tensor([len(engine.fp8.weights)], device=engine.device)
    if isinstance(engine, PipelineEngine) or engine.autotp_size() > 1:
        ds_comm.all_reduce(found)
    return int(found) == 0


def retype(zero: Any, host: type, context: Fp8Context, gradient_clipping: float) -> None:
    """Make `zero` an FP8 optimizer, its weights stored and gathered in FP8. Collective.

    Args:
        zero: an object of class `host`, or of the subclass that `building` makes of it.
        host: DeepSpeed's class.
        context: the engine's context.
        gradient_clipping: the norm that the engine clips at, 0 for none.
    """
    repairs = deepspeed_fixes.mixins(host, context.config, gradient_clipping)
    zero.__class__ = type(f"Fp8{host.__name__}", (_ADAPTERS[host], *repairs, host), {})
    if (device := vars(zero).pop(_DEVICE, None)) is not None:
        zero.device = device  # `Building12` has hidden it
    zero.fp8_init(context)
    start_count_anew(context)


def start_count_anew(context: Fp8Context) -> None:
    """Reset the byte counts: what `initialize` or a load gathered belongs to no step."""
    context.counter.end_step()
    context.counter.last = None


def check_release(engine: Any) -> None:
    """Refuse updates during the backward by what DeepSpeed has worked out; `refuse_release` has refused the settings.

    Raises:
        ConfigError: one backward is no step here, or gradients are not bf16.
    """
    steps, dtype = engine.gradient_accumulation_steps(), engine.get_data_types()[1]
    problems = {
        f"gradient_accumulation_steps {steps}": steps > 1,
        "a PipelineModule": isinstance(engine, PipelineEngine),
        f"data_types.grad_accum_dtype {dtype}": dtype != torch.bfloat16,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise no_release(found)


def adam_to_take_over(engine: Any, model_parameters: Any) -> torch.optim.Optimizer:
    """Return torch's Adam or AdamW with the options of the configuration; DeepSpeed builds no kernel for it.

    Raises:
        UnsupportedError: another optimizer is configured, or an option that FP8 states do not have.
    """
    name = (engine.optimizer_name() or "").lower()
    if name not in ("adam", "adamw"):
        raise UnsupportedError(
            f'optimizer.type: expected Adam or AdamW with fp8.optimizer.states "fp8", got {name}. '
            'Use one of these, or "states": "fp32".'
        )
    options = dict(engine.optimizer_params() or {})
    decoupled = options.pop("adam_w_mode", True) or name == "adamw"
    for kernel_choice in ("torch_adam", "fp32_optimizer_states", "foreach", "fused", "set_grad_none"):
        options.pop(kernel_choice, None)
    if not options.pop("bias_correction", True):
        raise UnsupportedError("optimizer.params.bias_correction: expected true with FP8 states, got false.")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(model_parameters, **options)
