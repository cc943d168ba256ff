"""What a graph of torch.compile holds of tensor parallelism: collectives that give new tensors, and may be reordered.

Outside graphs the same collectives are called as everywhere else (regions.py, gather.py); results have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8_ds.tp.context import TensorParallel

_P = ParamSpec("_P")
_R = TypeVar("_R")

is_tracing = torch.compiler.is_compiling
"""Whether this is being made a graph. Constant for torch.compile, which follows the branch that holds."""


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """torch.compile leaves `function` as it is: the graph ends before it."""
    left_alone: Callable[_P, _R] = torch.compiler.disable(function)
    return left_alone


def traced_where_possible(function: Callable[..., _R]) -> Callable[..., _R]:
    """For functions (x, tp, ...): part of a graph where `tp` says that this is possible."""
    left_alone = untraced(function)

    @functools.wraps(function)
    def chosen(x: Tensor, tp: TensorParallel, *args: Any, **kwargs: Any) -> _R:
        if is_tracing() and not tp.is_traceable:
            return left_alone(x, tp, *args, **kwargs)
        return function(x, tp, *args, **kwargs)

    return chosen


def all_gathered(shards: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """Of each [S, ...], which may be of any dtype of one byte and more, all ranks' [n S, ...]; one collective."""
    ops = torch.ops._c10d_functional
    sent = [shard.contiguous().view(-1).view(torch.uint8) for shard in shards]
    received = ops.all_gather_into_tensor_coalesced(sent, tp.size, tp.group_name)
    return [
        ops.wait_tensor(full).view(shard.dtype).view(tp.size * shard.shape[0], *shard.shape[1:])
        for full, shard in zip(received, shards, strict=True)
    ]


def reduce_scattered(x: Tensor, tp: TensorParallel) -> Tensor:
    """[T / n, C], own rows of the sum over ranks of [T, C]."""
    ops = torch.ops._c10d_functional
    own: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", tp.size, tp.group_name))
    return own


def all_reduced(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum over ranks."""
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", tp.group_name))
    return total
