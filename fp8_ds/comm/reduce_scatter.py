"""Reduce-scatter in one byte an element: each rank quantises once, all-to-all, and the destination adds in float64.

FP8 is never added to FP8: a reduction that sums hop by hop rounds at every hop, and the result depends on the ring.
Here a gradient is rounded once, to E4M3 with a power-of-two scale per 128 elements (as one byte, E8M0), and the
de-quantised values are added exactly. So the result is the same whichever rank held which addend.

Layout of what travels from one rank to another, per call one collective and one such block per destination:
`[num_groups * 128]` codes, `[num_groups]` exponents, filled up to a multiple of 16 bytes. Groups begin anew with every
piece (a slice of one parameter), for a bias and the matrix beside it have different ranges; its last group is filled
up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.formats import E4M3

GROUP = 128
"""Elements that share one scale."""

_ALIGNMENT = 16
_CHUNK_GROUPS = 1 << 16
"""Groups quantised or added at a time: 8 Mi elements, which bounds the float32 and float64 temporaries."""

_BROKEN = 255
"""Exponent of a group that holds an infinity or a NaN: decodes to infinity, and infinity times a code is not finite."""

_EXPONENT_OF_MAX = 8
_MANTISSA_OF_MAX = 0x600000
"""E4M3's largest value, 448, is 1.75 * 2**8: a float32 with this exponent and these mantissa bits."""


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in E4M3, each group by the largest power of two that does not saturate it; to nearest even.

    Args:
        x: float32 [num_groups, 128].

    Returns:
        (codes, exponents): float8_e4m3fn [num_groups, 128] and uint8 [num_groups]; `scale_inv` is
        `2**(exponent - 127)`. A group that is not finite has exponent 255 and de-quantises to NaN and infinity only.
    """
    assert E4M3.dtype is not None
    bits = x.abs().amax(1).view(torch.int32)
    biased, mantissa = bits >> 23, bits & 0x7FFFFF
    exponents = (biased - _EXPONENT_OF_MAX + (mantissa > _MANTISSA_OF_MAX).int()).clamp(min=1)
    exponents = torch.where(biased == 255, torch.full_like(exponents, _BROKEN), exponents)
    # 0 for a broken group: what is finite in it becomes 0 and not a random code, what is not becomes NaN.
    scale = ((254 - exponents).clamp(min=0) << 23).view(torch.float32)
    return (x * scale[:, None]).to(E4M3.dtype), exponents.to(torch.uint8)


def dequantize_groups(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 [num_groups, 128] of what `quantize_groups` gave; exact."""
    return codes.float() * (exponents.int() << 23).view(torch.float32)[:, None]


def num_groups(pieces: Sequence[Tensor]) -> int:
    return sum(-(-piece.numel() // GROUP) for piece in pieces)


def block_bytes(groups: int) -> int:
    """Size of the block that carries so many groups."""
    return groups * GROUP + -(-groups // _ALIGNMENT) * _ALIGNMENT


def _views(block: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [groups, 128], exponents uint8 [groups]) of a block, in place."""
    assert E4M3.dtype is not None
    codes = block.narrow(0, 0, groups * GROUP).view(E4M3.dtype).view(groups, GROUP)
    return codes, block.narrow(0, groups * GROUP, groups)


def _slices(groups: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """For each of `pieces` its elements in [num_groups, 128], where each begins a group."""
    flat, start, found = groups.view(-1), 0, []
    for piece in pieces:
        found.append(flat.narrow(0, start, piece.numel()))
        start += num_groups([piece]) * GROUP
    return found


def pack(pieces: Sequence[Tensor], block: Tensor) -> None:
    """Quantise `pieces` into `block`.

    Args:
        pieces: 1-D, bf16 or float32, any lengths.
        block: uint8 [block_bytes(num_groups(pieces))].
    """
    groups = num_groups(pieces)
    if groups == 0:
        return
    staging = pieces[0].new_zeros(groups, GROUP)
    torch._foreach_copy_(_slices(staging, pieces), list(pieces))
    codes, exponents = _views(block, groups)
    for start in range(0, groups, _CHUNK_GROUPS):
        rows = slice(start, start + _CHUNK_GROUPS)
        codes[rows], exponents[rows] = quantize_groups(staging[rows].float())


def unpack_sum(blocks: Sequence[Tensor], pieces: Sequence[Tensor], dtype: torch.dtype, factor: float) -> list[Tensor]:
    """`factor` times the sum of what `blocks` hold, as one tensor per piece.

    In float64: an addend is a multiple of `2**-9 * scale_inv` and below `2**9 * scale_inv`, so N ranks add exactly as
    long as a group's scales lie within `2**35 / N` of each other, and the order of ranks cannot show. float32 would
    leave `2**6 / N`.

    Args:
        blocks: one per rank, in rank order, each from a `pack` of pieces of these sizes.
        pieces: this rank's own; only their sizes are read.
        dtype: of the result; the one rounding after the quantisation.
        factor: 1 / N for an average.
    """
    groups = num_groups(pieces)
    total = pieces[0].new_empty(groups, GROUP, dtype=dtype) if pieces else torch.empty(0)
    views = [_views(block, groups) for block in blocks]
    for start in range(0, groups, _CHUNK_GROUPS):
        rows = slice(start, start + _CHUNK_GROUPS)
        added = torch.zeros_like(total[rows], dtype=torch.float64)
        for codes, exponents in views:
            added += dequantize_groups(codes[rows], exponents[rows])
        total[rows] = added.mul_(factor)
    return _slices(total, pieces)


def reduce_scatter_fp8(
    group: dist.ProcessGroup, pieces: Sequence[Sequence[Tensor]], dtype: torch.dtype, factor: float
) -> tuple[list[Tensor], int]:
    """The sum over ranks of what they have for this rank, times `factor`. Collective: one all-to-all of bytes.

    Args:
        group: of two or more ranks.
        pieces: `pieces[rank]` goes to that rank: 1-D slices of this rank's gradient, bf16 or float32, of the same
            sizes on all ranks; lists and slices may be empty.
        dtype: of the result.
        factor: 1 / N for an average.

    Returns:
        (sums, num_bytes): one 1-D tensor for each of this rank's own pieces; and the bytes that this rank handed to the
        collective, its own share included.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    assert len(pieces) == num_ranks > 1
    sizes = [block_bytes(num_groups(of_rank)) for of_rank in pieces]
    device = next((piece.device for of_rank in pieces for piece in of_rank), torch.device("cpu"))
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    # Destination by destination, so that what is staged is a share of the gradient and not all of it.
    for of_rank, block in zip(pieces, message.split(sizes), strict=True):
        pack(of_rank, block)
    received = torch.empty(num_ranks * sizes[rank], dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, message, [sizes[rank]] * num_ranks, sizes, group=group)
    num_bytes = message.numel()
    del message
    return unpack_sum(received.split(sizes[rank]) if sizes[rank] else [], pieces[rank], dtype, factor), num_bytes
