"""FP8 states under Megatron's optimizer classes on CPU: trainings, their bytes, masters and checkpoints.

Masters e4m19 and e4m11 are those of FP8 weights. Transformer Engine's Float8Tensor needs a GPU: here is a stand-in with
what Megatron and we use of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_training as mt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

SPLIT = "bf16_8"
FP8 = ("e4m19", "e4m11")
CODES = ("lo", "m", "v", "m_scale_inv", "v_scale_inv")


class StandIn(torch.Tensor):
    """Nominally bf16; holds uint8 `_data` and float32 `_scale_inv` [1]. Whatever computes with it gets its value."""

    _data: Tensor
    _scale_inv: Tensor
    _initial: Tensor | None
    _transpose: Tensor | None = None
    _quantizer = SimpleNamespace(set_usage=lambda **usages: None)

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, initial: Tensor | None) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv, made._initial = data, scale_inv, initial
        return made

    @classmethod
    def quantize(cls, value: Tensor) -> StandIn:
        scale_inv = (value.abs().max().float() / 448).reshape(1)  # not a power of two, as TE's current scaling
        data = (value.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
        return cls(data, scale_inv, value.detach().clone())

    def dequantize(self) -> Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).bfloat16()

    def get_high_precision_init_val(self) -> Tensor | None:
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        self._initial = None

    def _reset_caches(self) -> None:
        self._transpose = None

    def update_usage(self, columnwise_usage: bool) -> None:
        self._transpose = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._initial)
        if func is torch.ops.aten.copy_.default:
            made = cls.quantize(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            args[0]._data.copy_(made._data)
            args[0]._scale_inv.copy_(made._scale_inv)
            return args[0]
        args, kwargs = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def replace_raw_data(tensor: StandIn, data: Tensor) -> None:
    """Transformer Engine's function of this name."""
    data.copy_(tensor._data)
    tensor._data = data


def stand_in(drawn: Tensor) -> nn.Parameter:
    return nn.Parameter(StandIn.quantize(drawn))


def transpose(weights: list[StandIn]) -> None:
    """Transformer Engine's post_all_gather_processing, where no transpose is valid; here it is a copy."""
    for weight in weights:
        if weight._transpose is None:
            weight._transpose = weight._data.clone()


stock_build = mt.build


def build(layout: mt.Layout, make: Callable[[Tensor], nn.Parameter]) -> nn.Module:
    """mt.build's model; the weights of its layers are FP8: what `make` makes of those drawn."""
    module: nn.Module = stock_build(layout).bfloat16()
    for name, layer in module.named_modules():
        if "linear" in name and getattr(layer, "weight", None) is not None and layer.weight.dim() == 2:
            attributes = {k: v for k, v in vars(layer.weight).items() if not k.startswith("_")}
            layer.weight = make(layer.weight.detach())
            for key, value in attributes.items():
                setattr(layer.weight, key, value)
    return module


def bf16(distributed: bool, **kwargs: Any) -> mt.Layout:
    return mt.Layout(bf16=True, recipe=None, distributed_optimizer=distributed, **kwargs)


@contextmanager
def run(
    layout: mt.Layout,
    master: str | None,
    make: Callable[[Tensor], nn.Parameter] | None = None,
    drop_transposes: bool | None = None,
    **options: Any,
) -> Iterator[mt.Training]:
    """A training with these masters; None: stock.

    Args:
        make: makes an FP8 weight of what was drawn.
        drop_transposes: whether those of FP8 weights are; None: there are none.
        options: of Megatron's OptimizerConfig.
    """
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.transformer.moe import moe_utils

    from megatron_patches import optimizer, patches

    with pytest.MonkeyPatch.context() as patch, mt.megatron(layout):
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # 0.16.1's router asks for it where there is no Transformer Engine
        if master in FP8:
            # gloo coalesces tensors of two dtypes into wrong values
            patch.setattr(param_and_grad_buffer, "_coalescing_manager", lambda group, **kwargs: nullcontext())
            patch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
            patch.setattr(fp8_utils, "FP8_TENSOR_CLASS", StandIn)
            patch.setattr(fp8_utils, "_modify_underlying_storage_impl", replace_raw_data)
            patch.setattr(fp8_utils, "te_post_all_gather_processing", None if drop_transposes is None else transpose)
            patch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())
            patch.setattr(mt, "build", lambda layout: build(layout, make or stand_in))
            options["fp8_recipe"] = "tensorwise"
        of_states = optimizer.OptimizerStates(master, drop_transposes=bool(drop_transposes)) if master else None
        applied = patches.apply(optimizer.replacements(of_states)) if of_states else None
        try:
            yield mt.Training(layout, **options)
        finally:
            if applied:
                applied.remove()


def steps(training: mt.Training, num_steps: int, data: Iterator[Tensor] | None = None) -> list[float]:
    """Losses, averaged over data parallelism."""
    from megatron.core import parallel_state

    data = mt.batches(num_steps) if data is None else data
    size = parallel_state.get_data_parallel_world_size()
    losses = []
    for _ in range(num_steps):
        # NUM_MICRO is per rank: with two ranks a step takes half as many steps' worth of the same data.
        loss = training.step(data)
        if loss is not None:
            total = torch.tensor(loss)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses.append(float(total) / size)
    return losses


def push(training: mt.Training, norm: float, seed: int = 0) -> float:
    """One update by gradients of about this norm, the same in all data parallel ranks; the norm that was found."""
    params = list(training.module.parameters())
    std = norm / sum(p.numel() for p in params) ** 0.5
    for i, p in enumerate(params):
        p.main_grad.copy_(std * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i)))
    successful, found, _ = training.optimizer.step()
    assert successful
    return float(found)


# --- what a training holds ---


def fp8_weights(training: mt.Training) -> dict[str, Any]:
    return {name: p for name, p in training.module.named_parameters() if isinstance(p, StandIn)}


def local_bytes(training: mt.Training) -> dict[str, Tensor]:
    """All that an update may change on this rank, cloned; of stock states the weights alone."""
    found = {}
    for name, p in training.module.named_parameters():
        found[f"weight {name}"] = p._data.clone() if isinstance(p, StandIn) else p.detach().clone()
        if isinstance(p, StandIn):
            found[f"scale_inv {name}"] = p._scale_inv.clone()
    for one in training.optimizer.chained_optimizers:
        if not hasattr(one.optimizer, "core"):
            continue
        core = one.optimizer.core
        for i, shard in enumerate(core.shards):
            found[f"{i} hi"] = shard.hi.clone()
            found |= {f"{i} {key}": getattr(shard, key).clone() for key in CODES if getattr(shard, key) is not None}
        found["step"] = core.step_count.clone()
        found["bound sums"] = torch.tensor(sorted(core.sums.by_group().items()), dtype=torch.float64)
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def masters(training: mt.Training) -> dict[str, Tensor]:
    """name -> float32 master, and moments, of full shape: gathered over data parallelism."""
    one = training.optimizer.chained_optimizers[0]
    found = {}
    for name, p in training.module.named_parameters():
        for key in ("param", "exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = _gathered(one, p, key)
    return found


def _gathered(one: Any, p: Any, key: str) -> Tensor:
    full = torch.zeros(p.numel())
    if hasattr(one, "gbuf_ranges"):
        group, dtype, bucket = one.model_param_gbuf_map.get(p, (None, None, None))
        if group is not None:
            param_range = one.gbuf_ranges[group][dtype][bucket]["param_map"][p]["param"]
            value = one._get_main_param_and_optimizer_states(p)[key]
            full[param_range.start : param_range.end] = value.detach().reshape(-1)
        dist.all_reduce(full)
        return full
    main = getattr(p, "main_param", p)
    if hasattr(one.optimizer, "read"):
        return one.optimizer.read(main, None if key == "param" else key).reshape(-1)
    return (main if key == "param" else one.optimizer.state[main][key]).detach().reshape(-1).clone()


def assert_bytes_follow_masters(training: mt.Training, master: str) -> None:
    """On every rank each FP8 weight is its master rounded to nearest, by one power of two, and nothing saturates."""
    from fp8_ds.numerics.masters import BY_NAME, encode

    dense = masters(training)
    weights = fp8_weights(training)
    assert weights
    for name, p in weights.items():
        value = dense[f"{name} param"]
        assert torch.equal(encode(value, BY_NAME[master], p._scale_inv)[0], p._data.flatten()), name
        assert float(torch.frexp(p._scale_inv)[0]) == 0.5, name
        assert float(value.abs().max()) <= 448 * float(p._scale_inv) * (1 + 2**-10), name


# --- checkpoints ---

FORMATS: dict[str, dict[str, Any]] = {
    "dp_reshardable": {"distrib_optim_sharding_type": "dp_reshardable"},
    "fully_reshardable": {"distrib_optim_sharding_type": "fully_reshardable"},
    "fully_reshardable_gloo": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "dp_zero_gather_scatter": {"distrib_optim_sharding_type": "dp_zero_gather_scatter"},
    "legacy": {},
}


def save(training: mt.Training, folder: str, form: str) -> None:
    """As megatron.training does it."""
    from megatron.core import dist_checkpointing

    if form == "legacy":
        if hasattr(training.optimizer.chained_optimizers[0], "gbuf_ranges"):
            training.optimizer.save_parameter_state(f"{folder}/distrib_optim.pt")
        if dist.get_rank() == 0:
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state, f"{folder}/model_optim_rng.pt")
        dist.barrier()
        return
    with mt.writers():
        dist_checkpointing.save(_sharded(training, form, False), folder)


def _sharded(training: mt.Training, form: str, is_loading: bool) -> dict[str, Any]:
    metadata = dict(FORMATS[form])  # Megatron writes its group into it
    model = getattr(training.module, "module", training.module).sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def load(training: mt.Training, folder: str, form: str) -> None:
    from megatron.core import dist_checkpointing

    if form == "legacy":
        state = torch.load(f"{folder}/model_optim_rng.pt", weights_only=False)
    else:
        state = dist_checkpointing.load(_sharded(training, form, True), folder)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    if Path(folder, "distrib_optim.pt").exists():
        training.optimizer.load_parameter_state(f"{folder}/distrib_optim.pt")
