"""All-to-all from shards of the sequence to shards of the heads (Ulysses), in FP8, and back for gradients.

Shape suffixes: n ranks, S tokens of one rank, H heads, D elements of a head, R rows of D elements each.

Each head of each token is a row with a power of two of its own, which travels as its exponent: D + 1 bytes a row. On
arrival it leaves FP8 by it; nothing is aligned, and no rank waits for another's largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, Float8Format
from fp8_ds.ops.once_differentiable import once_differentiable
from fp8_ds.tp.rules import quantize_rows_pow2

_HEADS = 2
"""The dim of the heads."""
_MANTISSA_BITS = 23


def exchange(shards: Sequence[Tensor], group: dist.ProcessGroup, fmt: Float8Format | None) -> list[Tensor]:
    """Send part [r] of each tensor [n, ..., D] to rank r; return the parts that the ranks sent, in their order.

    Collective: one all-to-all for all tensors.

    Args:
        shards: contiguous, the same shapes and dtypes on all ranks.
        group: of n ranks.
        fmt: format on the wire; None: the tensors' own dtype. A row with a NaN or an infinity arrives without a finite
            number other than zero.

    Returns:
        Tensors of the shapes and dtypes of `shards`.
    """
    num_ranks = dist.get_world_size(group)
    packed = [_pack(shard, fmt) for shard in shards]
    sizes = [part.numel() // num_ranks for parts in packed for part in parts]
    sent = torch.cat([part.view(num_ranks, -1) for parts in packed for part in parts], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = iter(received.split(sizes, dim=1))
    return [_unpack([next(parts) for _ in own], shard, fmt) for own, shard in zip(packed, shards, strict=True)]


def _pack(shard: Tensor, fmt: Float8Format | None) -> list[Tensor]:
    """Return the bytes of [n, ..., D], uint8; or its codes, and the exponents of its rows."""
    if fmt is None:
        return [shard.view(torch.uint8)]
    codes, scale_inv = quantize_rows_pow2(shard.view(-1, shard.shape[-1]), fmt)
    exponents = (scale_inv.view(torch.int32) >> _MANTISSA_BITS) & 0xFF
    return [codes.view(torch.uint8), exponents.to(torch.uint8)]


def _unpack(parts: list[Tensor], like: Tensor, fmt: Float8Format | None) -> Tensor:
    if fmt is None:
        return parts[0].contiguous().view(like.dtype).view(like.shape)
    codes = parts[0].contiguous().view(fmt.torch_dtype).view(-1, like.shape[-1])
    scale_inv = (parts[1].reshape(-1, 1).to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return (codes.float() * scale_inv).to(like.dtype).view(like.shape)


def _cut(x: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Split `dim` into n pieces, [n, ...]."""
    return x.unflatten(dim, (num_ranks, -1)).movedim(dim, 0).contiguous()


def _join(x: Tensor, dim: int) -> Tensor:
    """Join the pieces of [n, ...] one after another in `dim`."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Any, dims: tuple[int, int], formats: Sequence[Float8Format | None], *xs: Tensor
    ) -> Any:
        ctx.group, (ctx.cut_dim, ctx.join_dim), (fmt, ctx.grad_format) = group, dims, formats
        shards = [_cut(x, ctx.cut_dim, dist.get_world_size(group)) for x in xs]
        return tuple(_join(one, ctx.join_dim) for one in exchange(shards, group, fmt))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shards = [_cut(grad, ctx.join_dim, dist.get_world_size(ctx.group)) for grad in grads]
        found = exchange(shards, ctx.group, ctx.grad_format)
        return None, None, None, *(_join(one, ctx.cut_dim) for one in found)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_heads(
    xs: Sequence[Tensor], group: dist.ProcessGroup, gather_dim: int, grad_format: Float8Format | None = None
) -> tuple[Tensor, ...]:
    """Exchange a rank's tokens of all heads for all tokens of its heads. Collective: one all-to-all each way.

    Args:
        xs: q, k and v: [S, b, H, D] or [b, S, H, D], H of each divisible by n.
        group: of n ranks, which bring the same shapes.
        gather_dim: dim of S.
        grad_format: format of the gradients on their way back; None: their own dtype.

    Returns:
        [n S, b, H / n, D] or [b, n S, H / n, D] of each, in its dtype.

    Raises:
        ValueError: something in `xs` has other dims, or heads that do not divide; on all ranks, as shapes are the same.
    """
    num_ranks = dist.get_world_size(group)
    for x in xs:
        if x.dim() != 4 or x.shape[_HEADS] % num_ranks:
            raise ValueError(
                f"xs: expected [S, b, H, D] or [b, S, H, D], H divisible by {num_ranks} ranks, got {tuple(x.shape)}. "
                "Use fewer ranks, or DeepSpeed's own exchange."
            )
    result: tuple[Tensor, ...] = _Exchange.apply(group, (_HEADS, gather_dim), (E4M3, grad_format), *xs)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_tokens(x: Tensor, group: dist.ProcessGroup, scatter_dim: int) -> Tensor:
    """Exchange all tokens of a rank's heads for its tokens of all heads, in x's dtype. Collective: one each way.

    Args:
        x: attention's output, of shape and heads as `exchange_heads` gives them.
        group: of n ranks.
        scatter_dim: dim of the tokens, 0 or 1.
    """
    (result,) = _Exchange.apply(group, (scatter_dim, _HEADS), (None, None), x)
    return result
