"""Hooks at a TP-sharded model's blocks: tokens are split before the first, and each block's input is gathered once."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8_ds.errors import ConfigError
from fp8_ds.nn.fused.mlp import FusedSwiglu
from fp8_ds.tp.context import TensorParallel, is_tracing
from fp8_ds.tp.linears import ColumnParallelFp8Linear, ColumnParallelLinear, gather_input
from fp8_ds.tp.regions import copy_to_ranks, gather_tokens, split_tokens


def gather_once(block: nn.Module, tp: TensorParallel, is_first: bool) -> None:
    """Let the column-parallel linears of `block` read one gathered input."""
    columns = [module for module in block.modules() if isinstance(module, ColumnParallelLinear)]
    for column in columns:
        column.gathers_input = False
    known = frozenset(map(id, block.parameters()))
    block.register_forward_pre_hook(_Entry(tp, _Argument(block), columns, is_first, known), with_kwargs=True)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tp.inputs.traced = None

    block.register_forward_hook(leave, always_call=True)


def shard_tokens(first: nn.Module, last: nn.Module, tp: TensorParallel) -> None:
    argument = _Argument(first)

    def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, put = argument(args, kwargs)
        if not is_tracing():
            _refuse_partitioned_activations(tp)
        if x.dim() != 3:
            raise ValueError(f"input of the first block: expected [batch, sequence, channels], got {tuple(x.shape)}.")
        tp.set_full_shape(x.shape[0], x.shape[1])
        return put(split_tokens(x, tp))

    def gather(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if tp.full_shape is None:
            raise ConfigError(
                f"plan: expected its `first` module to run before its `last`, a {type(module).__name__}, got none "
                "before it. Tokens are sharded at the input of the one, and gathered at the output of the other."
            )
        return gather_tokens(output, tp, (*tp.full_shape, output.shape[-1]), reduces=False)

    first.register_forward_pre_hook(split, with_kwargs=True)
    last.register_forward_hook(gather)


def _refuse_partitioned_activations(tp: TensorParallel) -> None:
    """Raise ConfigError if DeepSpeed's activation checkpointing divides what it keeps among the ranks that share a
    model: a rank would get back one part of its own tokens, and other ranks' tokens as the rest.

    Source: deepspeed/runtime/activation_checkpointing/checkpointing.py (0.19.8), partition_activations,
    gather_partitioned_activations and configure, which keeps its settings in the module.
    """
    checkpointing = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if tp.size > 1 and checkpointing and checkpointing.PARTITION_ACTIVATIONS and checkpointing.mpu is not None:
        raise ConfigError(
            "activation_checkpointing.partition_activations: expected false with sequence parallelism, got true. Each "
            "rank keeps its own tokens already, of which there is nothing to divide: remove the key, or the argument "
            "of deepspeed.checkpointing.configure."
        )


def added_parameters(model: nn.Module) -> list[str]:
    """Return names of Parameters that blocks have got since `parallelize` (as adapters are), which nobody sums.

    Outside blocks every rank has the whole gradient.
    """
    return [
        f"{block_name}.{name}"
        for block_name, block in model.named_modules()
        for hook in block._forward_pre_hooks.values()
        if isinstance(hook, _Entry)
        for name, p in block.named_parameters()
        if id(p) not in hook.known
    ]


class _Argument:
    """Finds the tensor that a module computes with: its first argument, by place or by name."""

    def __init__(self, module: nn.Module) -> None:
        self._names = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return (the tensor, a function that puts another in its place)."""
        if args:
            return args[0], lambda new: ((new, *args[1:]), kwargs)
        name = next(name for name in (*self._names, *kwargs) if isinstance(kwargs.get(name), Tensor))
        return kwargs[name], lambda new: (args, {**kwargs, name: new})


class _Entry:
    """Hook before a block that gathers its input as all of its column-parallel linears can read it.

    The input is gathered in FP8 if all of them are; in bf16 if one stays bf16, or if the configuration says so.

    Args:
        is_first: whether it is the model's first; there ranks compare their batches if tokens are not split.
        known: ids of the block's Parameters.
    """

    def __init__(
        self,
        tp: TensorParallel,
        argument: _Argument,
        columns: list[ColumnParallelLinear],
        is_first: bool,
        known: frozenset[int],
    ) -> None:
        self.tp = tp
        self.argument = argument
        self.columns = columns
        self.known = known
        self.check = tp.check_batch if is_first else partial(tp.check_first, is_replicated=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, put = self.argument(args, kwargs)
        if not self.tp.sequence_parallel:
            self.check(x, is_full=False)
            return put(copy_to_ranks(x, self.tp))
        if isinstance(module, FusedSwiglu) and module.fp8_function(args, kwargs) is not None:
            return None  # it gathers for itself
        shape = self._full_shape(x, kwargs)
        rules = [column.tp_rule for column in self.columns if isinstance(column, ColumnParallelFp8Linear)]
        if len(rules) < len(self.columns) or rules[0] is None:
            return put(gather_tokens(x, self.tp, shape, reduces=True))
        nominal, _ = gather_input(x, self.tp, rules[0], shape)
        return put(nominal)

    def _full_shape(self, x: Tensor, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Return (batch, sequence, C): attention needs to know where sequences begin. transformers' blocks get it with
        their positions, also when a backward computes them again."""
        num_tokens = self.tp.size * x[..., 0].numel()
        positions = kwargs.get("position_embeddings")
        if positions is None:
            return *self.tp.shape_of(num_tokens), x.shape[-1]
        length = positions[0].shape[-2]
        return num_tokens // length, length, x.shape[-1]
