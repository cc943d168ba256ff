"""What the tensor-parallel tests share. Runs inside the ranks of a pool, or of threads where no engine is built."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import training
from support.inputs import many_scales
from support.models import Llama
from torch import Tensor, nn

from fp8_ds.config import LinearConfig, TensorParallelConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.nn.linear.recipes import RECIPES
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp import (
    ColumnParallelLinear,
    ParallelGroups,
    RowParallelLinear,
    TensorParallel,
    TensorParallelPlan,
    parallelize,
)

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
    """The context of layers that all ranks share."""
    world = dist.group.WORLD
    assert world is not None
    return TensorParallel(world, sequence_parallel, TensorParallelConfig(**config))


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


def _part(kind: type[Any], module: nn.Linear, tp: TensorParallel, name: str | None, **config: Any) -> Any:
    """This rank's part of a copy, in FP8; in high precision if there is no recipe."""
    part = kind.from_full(copy.deepcopy(module), tp)
    return part if name is None else kind.fp8_class.from_linear(part, recipe(name, **config))


column_fp8, row_fp8 = partial(_part, ColumnParallelLinear), partial(_part, RowParallelLinear)


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


def _run_part(is_column: bool, module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """As of the whole layer, of which x [T, I] and grad [T, O] are."""
    tp = module.tp
    own: Any = own_rows if tp.sequence_parallel else lambda tp, x: x
    joined: Any = all_rows if tp.sequence_parallel else lambda tp, x: x
    if is_column:
        join = {"output": all_cols, "grad_input": joined, "grad_weight": all_rows, "grad_bias": all_cols}
        found = run_linear(module, own(tp, x), own_cols(tp, grad))
    else:
        join = {"output": joined, "grad_input": all_cols, "grad_weight": all_cols, "grad_bias": lambda tp, x: x}
        found = run_linear(module, own_cols(tp, x), own(tp, grad))
    return {key: join[key](tp, value) for key, value in found.items()}


RUN = {"column": (column_fp8, partial(_run_part, True)), "row": (row_fp8, partial(_run_part, False))}


# --- against one device ---


T, IN, OUT = 128, 256, 512
SHARDED_RECIPES = ("tensorwise", "rowwise", "blockwise")
"""Recipes whose layers gather in FP8."""
ALLOWED_LOSS = {("row", "rowwise"): 1.5}
"""Loss in dB beside one device, by kind and recipe; else 0.3. A column-parallel weight's rows and a row-parallel
weight's columns are other rows than the whole's, and with rowwise a gathered grad_output meets a weight that was
quantised once more: 1.2 dB of grad_input."""


def operands() -> tuple[Tensor, Tensor]:
    """x [T, IN] and grad_output [T, OUT], bf16, each token and channel in a range of its own."""
    x = many_scales("per_row", T, IN, 0) * many_scales("per_column", T, IN, 1)
    grad = many_scales("per_row", T, OUT, 2) * 1e-3
    return x.to(device(), torch.bfloat16), grad.to(device(), torch.bfloat16)


def normal() -> tuple[Tensor, Tensor]:
    """As `operands`, of normal values."""
    generator = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(T, size, generator=generator) for size in (IN, OUT))
    return x.to(device(), torch.bfloat16), (grad * 1e-4).to(device(), torch.bfloat16)


def grads_of(name: str) -> dict[str, Any]:
    return {"grad_dtype": "e4m3", "backend": "reference"} if name == "blockwise" else {}


def against_whole(
    kind: str, name: str, sequence_parallel: bool, data: Callable[[], tuple[Tensor, Tensor]]
) -> dict[str, tuple[float, float]]:
    """SQNR in dB of each result against the exact product: (of the parts, of the whole FP8 layer)."""
    x, grad = data()
    layer = linear(OUT, IN, torch.bfloat16)
    exact = run_linear(copy.deepcopy(layer).double(), x.double(), grad.double())
    whole = run_linear(whole_fp8(layer, name, **grads_of(name)), x, grad)
    make, run = RUN[kind]
    parts = run(make(layer, context(sequence_parallel), name, **grads_of(name)), x, grad)
    return {key: (sqnr_db(exact[key], parts[key]), sqnr_db(exact[key], whole[key])) for key in exact}


# --- models ---


def llama(
    dtype: torch.dtype = torch.float32, bias: bool = False, seed: int = 0, num_layers: int = 2, **sizes: Any
) -> Llama:
    """A seeded Llama whose heads and features divide by 4, with norms and biases that do something."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": num_layers, **sizes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Llama(**sizes, **({"attention_bias": True, "mlp_bias": True} if bias else {}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.to(dtype)


def to_fp8(model: nn.Module, recipe: str = "tensorwise") -> None:
    config = LinearConfig(recipe=recipe, **({"backend": "reference"} if recipe == "blockwise" else {}))
    apply_plan(model, make_plan(model, config), config, "cpu")


def whole(model: nn.Module, name: str, tensor: Tensor, tp: TensorParallel) -> Tensor:
    """Join a parameter's tensor of all ranks."""
    p = model.get_parameter(name)
    if not getattr(p, "tensor_model_parallel", False):
        return tensor
    dim = p.partition_dim
    return all_rows(tp, tensor.transpose(0, dim).contiguous()).transpose(0, dim)


def gradients_beside_whole(
    model: nn.Module, batch: Tensor, plan: TensorParallelPlan, fp8: bool = False, sequence_parallel: bool = True
) -> dict[str, float]:
    """SQNR of the loss and all gradients of a copy of `model`, sharded over all ranks, to those of `model`.

    Args:
        model: what all ranks of threads may share: it is left as it is.
        fp8: both are in FP8.
    """
    reference, sharded = copy.deepcopy(model), copy.deepcopy(model)
    world = dist.group.WORLD
    assert world is not None
    tp = parallelize(sharded, plan, world, sequence_parallel=sequence_parallel)
    losses = []
    for one in (reference, sharded):
        if fp8:
            to_fp8(one)
        losses.append(one(batch))
        losses[-1].backward()
    found = {"loss": sqnr_db(losses[0], losses[1])}
    for name, p in reference.named_parameters():
        found[name] = sqnr_db(p.grad, whole(sharded, name, sharded.get_parameter(name).grad, tp))
    return found


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
