"""Exchange of activations between tensor-parallel layers: autograd functions, at most one collective each way.

    function           forward                          backward
    split_tokens       own tokens of a full tensor      all-gather
    gather_tokens      all-gather                       own tokens, or reduce-scatter
    gather_tokens_fp8  all-gather in FP8                reduce-scatter
    reduce_tokens      reduce-scatter                   all-gather
    copy_to_ranks      nothing                          all-reduce
    sum_over_ranks     all-reduce                       nothing

Tokens are the leading dims of a tensor, flattened: rank r has tokens [r T / n, (r + 1) T / n), wherever sequences
begin. A shard is [1, T / n, C].

torch.compile takes all of them into its graphs, and the FP8 layers between them; with ZeRO-3 graphs end at the borders
of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.ops._register import once_differentiable
from fp8_ds.tp.context import TensorParallel, is_tracing, traced_where_possible
from fp8_ds.tp.gather import Gathered, Shard
from fp8_ds.tp.group import all_gather

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_traced: Any = torch.ops._c10d_functional
"""Collectives in graphs of torch.compile: they give new tensors, with the same bits, and may be reordered."""


def _all_gathered(shards: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """Gather all ranks' [n S, ...] of each [S, ...], in a graph; one collective."""
    sent = [shard.contiguous().view(-1).view(torch.uint8) for shard in shards]
    received = _traced.all_gather_into_tensor_coalesced(sent, tp.size, tp.group_name)
    return [
        _traced.wait_tensor(full).view(shard.dtype).view(tp.size * shard.shape[0], *shard.shape[1:])
        for full, shard in zip(received, shards, strict=True)
    ]


def gather_shard(shard: Shard, tp: TensorParallel) -> Gathered:
    """Gather every rank's `shard`, asynchronously where possible. Collective."""
    if is_tracing():
        codes, scale_inv = _all_gathered([shard.codes, shard.scale_inv[None]], tp)
        return Gathered.arrived_whole(codes, scale_inv)
    gathered = Gathered(tp.group, shard)
    tp.num_bytes_gathered += gathered.num_bytes
    return gathered


def gathered_tokens(tp: TensorParallel, x: Tensor) -> Tensor:
    """Gather [T, C] of every rank's [..., C], in x's dtype."""
    shard = x.reshape(-1, x.shape[-1]).contiguous()
    if is_tracing():
        return _all_gathered([shard], tp)[0]
    full = shard.new_empty((tp.size * shard.shape[0], shard.shape[1]))
    all_gather(full, shard, group=tp.group)
    return full


def own_tokens(tp: TensorParallel, x: Tensor) -> Tensor:
    """Return this rank's [T / n, C] of a full [..., C]."""
    tokens = x.reshape(-1, x.shape[-1])
    num = tokens.shape[0] // tp.size
    return tokens[tp.rank * num : (tp.rank + 1) * num]


def reduced_tokens(tp: TensorParallel, x: Tensor) -> Tensor:
    """Return own tokens [T / n, C] of the sum over ranks of [..., C]; the backend adds (it may round at every hop)."""
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    if is_tracing():
        own: Tensor = _traced.reduce_scatter_tensor(tokens, "sum", tp.size, tp.group_name)
        return _traced.wait_tensor(own)
    own = tokens.new_empty((tokens.shape[0] // tp.size, tokens.shape[1]))
    _reduce_scatter(own, tokens, group=tp.group)
    return own


def start_reduction(tp: TensorParallel, x: Tensor) -> Callable[[], Tensor]:
    """Start `reduced_tokens` of x, where possible beside what is launched next; the result waits and returns it."""
    if is_tracing():
        reduced = reduced_tokens(tp, x)
        return lambda: reduced
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    own = tokens.new_empty((tokens.shape[0] // tp.size, tokens.shape[1]))
    work = _reduce_scatter(own, tokens, group=tp.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return own

    return wait


def summed_over_ranks(tp: TensorParallel, x: Tensor) -> Tensor:
    """Return the sum over ranks, on all of them; a new tensor."""
    if is_tracing():
        return _traced.wait_tensor(_traced.all_reduce(x.contiguous(), "sum", tp.group_name))
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.shape = tp, x.shape
        return own_tokens(tp, x)[None].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered_tokens(ctx.tp, grad).view(ctx.shape), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, shape: tuple[int, ...], reduces: bool) -> Tensor:
        ctx.tp, ctx.shape, ctx.reduces = tp, x.shape, reduces
        return torch.ops.aten._unsafe_view.default(gathered_tokens(tp, x), shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = reduced_tokens(ctx.tp, grad) if ctx.reduces else own_tokens(ctx.tp, grad)
        return own.reshape(ctx.shape), None, None, None


class _GatherFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nominal: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.shape = tp, x.shape
        return nominal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduced_tokens(ctx.tp, grad).view(ctx.shape), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.shape = tp, x.shape
        own = reduced_tokens(tp, x)
        return torch.ops.aten._unsafe_view.default(own, (1, *own.shape))  # a view could not be written in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered_tokens(ctx.tp, grad).view(ctx.shape), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed_over_ranks(ctx.tp, grad), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return summed_over_ranks(tp, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@traced_where_possible
def split_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's [1, T / n, C] of a tensor [..., C] that all ranks have."""
    tp.check_batch(x, is_full=True)
    return _Split.apply(x, tp)


@traced_where_possible
def gather_tokens(x: Tensor, tp: TensorParallel, shape: tuple[int, ...] | None = None, *, reduces: bool) -> Tensor:
    """Gather all ranks' tokens.

    Args:
        x: [..., C], this rank's.
        shape: of the result; None: [1, T, C].
        reduces: whether what follows differs from rank to rank, so that gradients have to be added.
    """
    shape = shape or (1, tp.size * x[..., 0].numel(), x.shape[-1])
    return _Gather.apply(x, tp, shape, reduces)


@traced_where_possible
def gather_tokens_fp8(
    x: Tensor, tp: TensorParallel, gathered: Gathered, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Return a nominal tensor that stands for `gathered`, for column-parallel FP8 layers alone: others read NaN.

    Args:
        x: [..., C], this rank's; its gradient is the sum of what the ranks' layers give for its tokens.
        gathered: of x.
        shape: of the result; None: [1, T, C].
    """
    nominal = torch.full((1,), float("nan"), dtype=x.dtype, device=x.device).expand(shape or (1, *gathered.shape))
    result: Tensor = _GatherFp8.apply(x, nominal, tp)
    if is_tracing():
        tp.inputs.traced = result, gathered
    else:
        tp.inputs.put(result, gathered)
    return result


@traced_where_possible
def reduce_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's [1, T / n, C] of the sum over ranks of [..., C]."""
    return _Reduce.apply(x, tp)


@traced_where_possible
def copy_to_ranks(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return x, which all ranks have; its gradient is the sum of theirs."""
    return _Copy.apply(x, tp)


@traced_where_possible
def sum_over_ranks(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the sum over ranks, for all of which the same follows."""
    return _Sum.apply(x, tp)
