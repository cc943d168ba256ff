"""What the tensor-parallel tests share. Runs inside the ranks of a pool."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import training
from support.inputs import many_scales
from torch import Tensor, nn

from fp8_ds.config import LinearConfig, TensorParallelConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.nn.linear.recipes import RECIPES
from fp8_ds.testing import assert_bitwise
from fp8_ds.tp import ColumnParallelLinear, ParallelGroups, RowParallelLinear, TensorParallel

GROUPS: dict[int, ParallelGroups] = {}
"""By their tensor-parallel size: a pool's processes stay, and groups are not made again."""


def groups(tp_size: int) -> ParallelGroups:
    if tp_size not in GROUPS:
        GROUPS[tp_size] = ParallelGroups(tp_size)
    return GROUPS[tp_size]


def sequence_parallel_mpu() -> Any:
    """All ranks of the pool share their sequences. The functions of deepspeed.runtime.sequence_parallel's
    parallel_state_sp, whose groups can be made once a process."""
    found = SimpleNamespace(initialize_sequence_parallel=None)
    for name in ("sequence_parallel", "sequence_data_parallel", "model_parallel"):
        setattr(found, f"get_{name}_group", lambda: dist.group.WORLD)
        setattr(found, f"get_{name}_world_size", dist.get_world_size)
        setattr(found, f"get_{name}_rank", dist.get_rank)
    return found


def device() -> str:
    """Of a pool's ranks."""
    return "cuda" if os.environ.get("DS_ACCELERATOR") == "cuda" else "cpu"


def context(sequence_parallel: bool = True, **config: Any) -> TensorParallel:
    """Of all ranks of the pool."""
    return TensorParallel(groups(dist.get_world_size()).tp_group, sequence_parallel, TensorParallelConfig(**config))


def recipe(name: str, **config: Any) -> Recipe:
    return RECIPES[name](LinearConfig(recipe=name, **config))


def linear(out_features: int, in_features: int, dtype: torch.dtype, bias: bool = True, seed: int = 0) -> nn.Linear:
    """Weights in ranges of their own for each tile; the same on all ranks."""
    module = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        module.weight.copy_(many_scales("per_tile", out_features, in_features, seed) * in_features**-0.5)
        if bias:
            module.bias.copy_(many_scales("per_row", 1, out_features, seed + 1)[0])
    return module.to(device(), dtype)


def whole_fp8(module: nn.Linear, name: str, **config: Any) -> Fp8Linear:
    return Fp8Linear.from_linear(copy.deepcopy(module), recipe(name, **config))


def column_fp8(module: nn.Linear, tp: TensorParallel, name: str | None, **config: Any) -> Any:
    """A column-parallel part of a copy, in FP8; in high precision if there is no recipe."""
    part = ColumnParallelLinear.from_full(copy.deepcopy(module), tp)
    return part if name is None else ColumnParallelLinear.fp8_class.from_linear(part, recipe(name, **config))


def row_fp8(module: nn.Linear, tp: TensorParallel, name: str | None, **config: Any) -> Any:
    part = RowParallelLinear.from_full(copy.deepcopy(module), tp)
    return part if name is None else RowParallelLinear.fp8_class.from_linear(part, recipe(name, **config))


def own_rows(tp: TensorParallel, x: Tensor) -> Tensor:
    return x.chunk(tp.size)[tp.rank].clone()


def own_cols(tp: TensorParallel, x: Tensor) -> Tensor:
    return x.chunk(tp.size, dim=-1)[tp.rank].clone()


def all_rows(tp: TensorParallel, x: Tensor) -> Tensor:
    """Every rank's [s, C], one after another."""
    parts = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts)


def all_cols(tp: TensorParallel, x: Tensor) -> Tensor:
    return all_rows(tp, x.t().contiguous()).t().contiguous()


def run_linear(module: nn.Linear, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """output, grad_input, grad_weight and grad_bias, as matrices."""
    x = x.detach().clone().requires_grad_()
    output = module(x)
    output.backward(grad.view(output.shape))
    found = {"output": output.detach().flatten(0, -2), "grad_input": x.grad, "grad_weight": module.weight.grad}
    if module.bias is not None:
        found["grad_bias"] = module.bias.grad[None]
    return found


def run_column(module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """As of the whole layer, of which x [T, I] and grad [T, O] are."""
    tp = module.tp
    own = own_rows(tp, x) if tp.sequence_parallel else x
    found = run_linear(module, own, own_cols(tp, grad))
    found["output"] = all_cols(tp, found["output"])
    found["grad_weight"] = all_rows(tp, found["grad_weight"])
    if tp.sequence_parallel:
        found["grad_input"] = all_rows(tp, found["grad_input"])
    if module.bias is not None:
        found["grad_bias"] = all_cols(tp, found["grad_bias"])
    return found


def run_row(module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    tp = module.tp
    found = run_linear(module, own_cols(tp, x), own_rows(tp, grad) if tp.sequence_parallel else grad)
    if tp.sequence_parallel:
        found["output"] = all_rows(tp, found["output"])
    found["grad_weight"] = all_cols(tp, found["grad_weight"])
    found["grad_input"] = all_cols(tp, found["grad_input"])
    return found


RUN = {"column": (column_fp8, run_column), "row": (row_fp8, run_row)}


# --- in an engine ---


NUM_BATCHES = 2
"""Micro-batches of a step, over all data-parallel ranks and accumulation steps."""


def train(
    engine: Any, tp_size: int, num_steps: int, first_step: int = 0, *, is_huggingface: bool = False
) -> tuple[list[float], list[float]]:
    """Return (losses, gradient norms) of the same global batches whatever the groups.

    Args:
        is_huggingface: the model takes `input_ids` and `labels`; else tokens, and it returns the loss.
    """
    dp_size, dp_rank = dist.get_world_size() // tp_size, dist.get_rank() // tp_size
    losses, norms = [], []
    for step in range(first_step, first_step + num_steps):
        total = torch.zeros(())
        for batch in training.micro_batches(step, NUM_BATCHES)[dp_rank::dp_size]:
            loss = engine(input_ids=batch, labels=batch).loss if is_huggingface else engine(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / (NUM_BATCHES * tp_size))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def resume(build: Callable[[int], Any], train: Callable[..., Any], destroy: Callable[[Any], None], path: str) -> None:
    """Three steps, a checkpoint, two more; the same two of another engine that has loaded it.

    Args:
        build: makes an engine from a seed.
    """
    engine = build(0)
    train(engine, 2, 3)
    engine.save_checkpoint(path, tag="third")
    expected = train(engine, 2, 2, first_step=3)
    masters, weights = training.full_masters(engine), training.fp8_state(engine)
    destroy(engine)
    engine = build(5)
    assert engine.load_checkpoint(path, tag="third")[0] is not None
    assert train(engine, 2, 2, first_step=3) == expected
    for name, master in training.full_masters(engine).items():
        assert_bitwise(master, masters[name])
    training.assert_fp8_equals(training.fp8_state(engine), weights)
    destroy(engine)
