"""Reduce-scatter in one byte an element: quantise once, exchange by all-to-all, add in float64 at the destination.

FP8 is never added to FP8: a reduction that sums hop by hop rounds at every hop. Here a gradient is rounded once, to
E4M3 with a power-of-two scale per 128 elements (as one byte, E8M0), and the de-quantised values are added exactly: the
result is the same whichever rank held which addend.

A message from one rank to another is a block of `[num_groups * 128]` codes and `[num_groups]` exponents, padded to a
multiple of 16 bytes. Groups begin anew with every piece (a slice of one parameter), because a bias and the matrix
beside it have different ranges; the last group of a piece is padded with zeros.

Where few ranks keep all of a bucket, as in ZeRO-2 with many, they would receive it from every rank while the others
idle. There each rank adds an equal part, and sends the sums on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import all_to_all, is_worth_it, reduce_scatter_each
from fp8_ds.comm.gather import equal_parts
from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.formats import E4M3

GROUP = 128
"""Elements that share one scale."""

_WORTH_A_COLLECTIVE = 0.8
"""A second collective must bring the bytes that the busiest rank receives below this share."""

_MANY = 16
"""With more destinations than this the sums cost less than so many launches."""
_ALIGNMENT = 16
_CHUNK_GROUPS = 1 << 16
"""Groups quantised or added at a time: 8 Mi elements, which bounds the float32 and float64 temporaries."""

_BROKEN = 255
"""Exponent of a group that holds an infinity or a NaN: decodes to infinity, and infinity times a code is not finite."""

_EXPONENT_OF_MAX = 8
_MANTISSA_OF_MAX = 0x600000
"""E4M3's largest value, 448, is 1.75 * 2**8: a float32 with this exponent and these mantissa bits."""


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x` to E4M3, each group by the largest power of two that does not saturate it; to nearest even.

    Args:
        x: float32 [..., 128].

    Returns:
        (codes, exponents): float8_e4m3fn [..., 128] and uint8 [...]; `scale_inv` is `2**(exponent - 127)`. A group that
        is not finite has exponent 255 and de-quantises to NaN and infinity only.
    """
    bits = x.abs().amax(-1).view(torch.int32)
    biased, mantissa = bits >> 23, bits & 0x7FFFFF
    exponents = (biased - _EXPONENT_OF_MAX + (mantissa > _MANTISSA_OF_MAX).int()).clamp(min=1)
    exponents = torch.where(biased == 255, torch.full_like(exponents, _BROKEN), exponents)
    # 0 for a broken group: what is finite in it becomes 0 and not a random code, what is not becomes NaN.
    scale = ((254 - exponents).clamp(min=0) << 23).view(torch.float32)
    return (x * scale[..., None]).to(E4M3.torch_dtype), exponents.to(torch.uint8)


def dequantize_groups(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [..., 128] from the output of `quantize_groups`; exact."""
    return codes.float() * (exponents.int() << 23).view(torch.float32)[..., None]


def num_groups(sizes: Sequence[int]) -> int:
    """Return the number of groups of pieces with these numbers of elements."""
    return sum(-(-size // GROUP) for size in sizes)


def block_bytes(groups: int) -> int:
    """Return the size of a block that carries this many groups."""
    return groups * GROUP + -(-groups // _ALIGNMENT) * _ALIGNMENT


def _views(blocks: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """View blocks [rows, bytes] as (codes float8_e4m3fn [rows, groups, 128], exponents uint8 [rows, groups])."""
    codes = blocks[:, : groups * GROUP].view(E4M3.torch_dtype).unflatten(1, (groups, GROUP))
    return codes, blocks[:, groups * GROUP : groups * GROUP + groups]


def _slices(groups: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the elements of pieces of these sizes in [num_groups, 128], where each begins a group."""
    flat = groups.view(-1)
    return [flat.narrow(0, start, size) for start, size in zip(_starts(sizes), sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the first element of each piece, where each begins a group, and the end of the last one."""
    return [0, *accumulate(num_groups([size]) * GROUP for size in sizes)]


def _numels(pieces: Sequence[Tensor]) -> list[int]:
    return [piece.numel() for piece in pieces]


def pack(blocks: Tensor, groups: int, dtype: torch.dtype, fill: Callable[[Tensor, int], None]) -> None:
    """Quantise into `blocks` what `fill` brings.

    Args:
        blocks: uint8 [rows, block_bytes(groups)].
        groups: number in each block, at least one.
        dtype: bf16 or float32, in which `fill` writes.
        fill: fill(staging, first) writes the blocks from `first` on into zeros [some, groups * 128]: one block, or as
            many as fit into a chunk.
    """
    codes, exponents = _views(blocks, groups)
    rows = max(1, _CHUNK_GROUPS // groups)
    for first in range(0, len(blocks), rows):
        some = slice(first, min(first + rows, len(blocks)))
        staging = torch.zeros(some.stop - first, groups * GROUP, dtype=dtype, device=blocks.device)
        fill(staging, first)
        values = staging.unflatten(1, (groups, GROUP))
        for start in range(0, groups, _CHUNK_GROUPS):
            part = slice(start, start + _CHUNK_GROUPS)
            codes[some, part], exponents[some, part] = quantize_groups(values[:, part].float())


def unpack_sum(blocks: Tensor, groups: int, dtype: torch.dtype, factor: float) -> Tensor:
    """Return `factor` times the sum of the values in `blocks`, [groups, 128].

    The sum is in float64: an addend is a multiple of `2**-9 * scale_inv` and below `2**9 * scale_inv`, so N ranks add
    exactly as long as a group's scales lie within `2**35 / N` of each other (float32: `2**6 / N`).

    Args:
        blocks: uint8 [ranks, block_bytes(groups)], each from a `pack` of pieces of the same sizes.
        groups: number in each block.
        dtype: of the result; converting to it is the one rounding after the quantisation.
        factor: 1 / N for an average.
    """
    total = torch.empty(groups, GROUP, dtype=dtype, device=blocks.device)
    if groups == 0:
        return total
    codes, exponents = _views(blocks, groups)
    ranks = max(1, _CHUNK_GROUPS // groups)
    for start in range(0, groups, _CHUNK_GROUPS):
        part = slice(start, start + _CHUNK_GROUPS)
        added = torch.zeros_like(total[part], dtype=torch.float64)
        for first in range(0, len(blocks), ranks):
            some = slice(first, first + ranks)
            added += dequantize_groups(codes[some, part], exponents[some, part]).sum(0, dtype=torch.float64)
        total[part] = added.mul_(factor)
    return total


def reduce_scatter_fp8(
    group: dist.ProcessGroup, pieces: Sequence[Sequence[Tensor]], dtype: torch.dtype, factor: float
) -> tuple[list[Tensor], int]:
    """Sum the pieces that all ranks have for this rank, times `factor`. Collective.

    One all-to-all sends each piece to its destination. Where `is_balanced` says so, one all-to-all gives every rank an
    equal part to add, and another sends the sums on, with the same bits.

    Args:
        group: of two or more ranks.
        pieces: `pieces[rank]` goes to that rank: 1-D slices of this rank's gradient, all bf16 or all float32, of the
            same sizes on all ranks; lists and slices may be empty.
        dtype: of the result.
        factor: 1 / N for an average.

    Returns:
        (sums, num_bytes): a 1-D tensor for each of this rank's own pieces; the bytes that it handed over, its own share
        included.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    assert len(pieces) == num_ranks > 1
    groups = [num_groups(_numels(of_rank)) for of_rank in pieces]
    if not any(groups):
        return [piece.to(dtype) for piece in pieces[rank]], 0
    exchange = _to_all if is_balanced(groups, dtype) else _to_owners
    sums, num_bytes = exchange(group, pieces, groups, dtype, factor)
    return _slices(sums, _numels(pieces[rank])), num_bytes


def is_balanced(groups: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether every rank adds an equal part: with many destinations, or if the busiest rank then receives less.

    Args:
        groups: for each rank the number that it keeps.
        dtype: of the sums.
    """
    if sum(count > 0 for count in groups) > _MANY:
        return True
    others, most = len(groups) - 1, max(groups)
    sums = most * GROUP * dtype.itemsize * others // len(groups)
    return others * block_bytes(_equal_part(groups)) + sums < _WORTH_A_COLLECTIVE * others * block_bytes(most)


def _equal_part(groups: Sequence[int]) -> int:
    return -(-sum(groups) // len(groups))


def _to_owners(
    group: dist.ProcessGroup,
    pieces: Sequence[Sequence[Tensor]],
    groups: Sequence[int],
    dtype: torch.dtype,
    factor: float,
) -> tuple[Tensor, int]:
    """Sum [groups, 128] of this rank's pieces, each rank adding its own."""
    num_ranks, rank = len(pieces), dist.get_rank(group)
    device = next(piece.device for of_rank in pieces for piece in of_rank)
    sizes = [block_bytes(of_rank) for of_rank in groups]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    # Destination by destination: what is staged is a share of the gradient, not all of it.
    for of_rank, count, block in zip(pieces, groups, message.split(sizes), strict=True):
        if count:
            pack(block[None], count, of_rank[0].dtype, partial(_fill_one, of_rank))
    received = torch.empty(num_ranks, sizes[rank], dtype=torch.uint8, device=device)
    all_to_all(received.view(-1), message, group, [sizes[rank]] * num_ranks, sizes)
    num_bytes = message.numel()
    del message
    return unpack_sum(received, groups[rank], dtype, factor), num_bytes


def _fill_one(pieces: Sequence[Tensor], staging: Tensor, first: int) -> None:
    torch._foreach_copy_(_slices(staging, _numels(pieces)), list(pieces))


def _to_all(
    group: dist.ProcessGroup,
    pieces: Sequence[Sequence[Tensor]],
    groups: Sequence[int],
    dtype: torch.dtype,
    factor: float,
) -> tuple[Tensor, int]:
    """Sum [groups, 128] of this rank's pieces, each rank adding an equal number of groups of all pieces."""
    rank = dist.get_rank(group)
    flat, part = [piece for of_rank in pieces for piece in of_rank], _equal_part(groups)
    starts = _starts(_numels(flat))

    def fill(staging: Tensor, first: int) -> None:
        line, begin = staging.view(-1), first * part * GROUP
        chunk = ShardRange(begin, begin + line.numel())
        to, source = [], []
        for piece, start in zip(flat, starts, strict=False):
            shared = ShardRange(start, start + piece.numel()).intersect(chunk)
            if shared.numel:
                to.append(shared.shift(-begin).narrow(line))
                source.append(shared.shift(-start).narrow(piece))
        if to:  # a chunk may lie behind the last piece, and an empty list is an error of torch's
            torch._foreach_copy_(to, source)

    added, num_bytes = _add_equal_blocks(group, part, flat[0], fill, dtype, factor)
    ends = [*accumulate(groups)]
    owned = [ShardRange(end - of_rank, end) for of_rank, end in zip(groups, ends, strict=True)]
    to_owners, from_all = (
        [GROUP * dtype.itemsize * count for count in counts] for counts in equal_parts(owned, part, rank)
    )
    sums = torch.empty(groups[rank], GROUP, dtype=dtype, device=added.device)
    outgoing = added.view(torch.uint8).view(-1)[: sum(to_owners)]
    all_to_all(sums.view(torch.uint8).view(-1), outgoing, group, from_all, to_owners)
    return sums, num_bytes + outgoing.numel()


def _add_equal_blocks(
    group: dist.ProcessGroup,
    groups: int,
    like: Tensor,
    fill: Callable[[Tensor, int], None],
    dtype: torch.dtype,
    factor: float,
) -> tuple[Tensor, int]:
    """Sum [groups, 128] of what `fill` (see `pack`; in `like`'s dtype) brings for this rank; also return bytes sent."""
    message = torch.empty(dist.get_world_size(group), block_bytes(groups), dtype=torch.uint8, device=like.device)
    pack(message, groups, like.dtype, fill)
    received = torch.empty_like(message)
    all_to_all(received, message, group)
    num_bytes = message.numel()
    del message
    return unpack_sum(received, groups, dtype, factor), num_bytes


def equal_shares(numels: Sequence[int], num_ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Return (the share of each tensor as ZeRO-3 splits it, this rank's elements of it, fewer on the last ranks)."""
    shares = [-(-numel // num_ranks) for numel in numels]
    return shares, [max(0, min(share, numel - rank * share)) for numel, share in zip(numels, shares, strict=True)]


def reduce_scatter_fp8_shares(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], dtype: torch.dtype, factor: float
) -> tuple[list[Tensor], int]:
    """Apply `reduce_scatter_fp8` to tensors that are each split into equal shares, as in ZeRO-3, by one all-to-all.

    Args:
        group: of two or more ranks.
        tensors: 1-D, bf16 or float32, one dtype, of the same sizes on all ranks.
        dtype: of the result.
        factor: 1 / N for an average.

    Returns:
        (sums, num_bytes): this rank's share of each tensor; the bytes that it handed over, its own share included.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    assert num_ranks > 1
    shares, sizes = equal_shares([tensor.numel() for tensor in tensors], num_ranks, rank)
    starts = _starts(shares)
    groups = starts[-1] // GROUP

    def fill(staging: Tensor, first: int) -> None:
        for tensor, share, start in zip(tensors, shares, starts, strict=False):
            own = tensor[first * share : (first + len(staging)) * share]
            whole = own.numel() // share if share else 0
            columns = staging[:, start : start + share]
            columns[:whole].copy_(own[: whole * share].view(whole, share))
            if rest := own.numel() - whole * share:
                columns[whole, :rest].copy_(own[whole * share :])

    if groups == 0:
        return [tensor.new_empty(0, dtype=dtype) for tensor in tensors], 0
    sums, num_bytes = _add_equal_blocks(group, groups, tensors[0], fill, dtype, factor)
    return [sums.view(-1).narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)], num_bytes


@torch.no_grad()
def reduce_scatter_shares(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    places: Sequence[Tensor | None] = (),
    owned: bool = False,
) -> list[Tensor]:
    """Average each tensor over the ranks and return this rank's shares. Collective.

    It replaces DeepSpeed's `reduce_scatter_coalesced`, which makes a tensor for each share of each tensor; with
    hundreds of ranks these are more launches than the rest of the backward (docs/reliability.md). Here large tensors
    that divide equally are sent in place, and torch splits the others in one launch (`_chunk_cat`, as FSDP2 packs
    gradients).

    With two ranks the result has the bits of DeepSpeed's, over NCCL except for subnormal numbers
    (`_is_divided_by_backend`). With more ranks the order of additions may depend on how gradients are split.

    Args:
        tensors: of one dtype and device, of the same sizes on all ranks.
        places: for each tensor the memory that its share may be written to (1-D, contiguous), which saves a copy.
        owned: whether a single tensor that needs no padding may be written to, as DeepSpeed does. Others are not:
            autograd may hand out one storage as the gradients of two parameters.

    Returns:
        1-D shares without padding, shorter or empty on the last ranks. A share written to its place is that tensor; a
        single rank's are the tensors.
    """
    from deepspeed import comm as ds_comm

    numels = [tensor.numel() for tensor in tensors]
    if not any(numels):
        return [tensor.view(-1) for tensor in tensors]
    num_ranks, rank = ds_comm.get_world_size(group), ds_comm.get_rank(group)
    if num_ranks == 1:
        return [tensor.reshape(-1) for tensor in tensors]
    shares, sizes = equal_shares(numels, num_ranks, rank)
    used = [index for index, numel in enumerate(numels) if numel]
    equal = [index for index in used if numels[index] % num_ranks == 0]
    num_bytes = sum(tensors[index].nbytes for index in equal) // num_ranks
    if len(used) > 1 and not is_worth_it(len(equal), num_bytes):
        equal = []
    wholes = [tensors[index].reshape(-1) for index in equal]
    if uneven := sorted({*used} - {*equal}):
        wholes.append(torch._chunk_cat([tensors[index].reshape(-1) for index in uneven], 0, num_ranks).view(-1))
    may_write = len(wholes) == 1 and (owned or not equal)  # `_chunk_cat` made it
    op = dist.ReduceOp.AVG
    if not _is_divided_by_backend(wholes[0], num_ranks, group):
        op = dist.ReduceOp.SUM
        if may_write:
            wholes[0].div_(num_ranks)
        else:
            wholes = list(torch._foreach_div(wholes, num_ranks))
    places = places or [None] * len(tensors)
    own_places = [_place(places[index], tensors[index], num_ranks) for index in equal] + [None] * bool(uneven)
    if may_write and own_places[0] is None:
        owns = [wholes[0].view(num_ranks, -1)[rank]]
    else:
        owns = [
            whole.new_empty(whole.numel() // num_ranks) if place is None else place
            for whole, place in zip(wholes, own_places, strict=True)
        ]
    if len(wholes) == 1:
        ds_comm.reduce_scatter_fn(owns[0], wholes[0], op=op, group=group)
    else:
        reduce_scatter_each(owns, wholes, op, group)
    found = dict(zip(equal, owns, strict=False))
    if uneven:
        found |= zip(uneven, owns[-1].split([shares[index] for index in uneven]), strict=True)
    return [found[i][: sizes[i]] if i in found else tensor.view(-1) for i, tensor in enumerate(tensors)]


def _place(place: Tensor | None, whole: Tensor, num_ranks: int) -> Tensor | None:
    """Return `place` if this rank's share of `whole` may be written there, else None.

    NCCL moves a buffer that is not aligned to 16 bytes one element at a time: copying the result is faster.
    """
    if place is None or (place.dtype, place.device) != (whole.dtype, whole.device) or place.data_ptr() % 16:
        return None
    return place if place.numel() * num_ranks == whole.numel() else None


def _is_divided_by_backend(tensor: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a reduction may average with a division's bits, except for subnormal numbers.

    NCCL 2.28.9 multiplies by 1 / num_ranks in one instruction with the addition: an odd multiple of the smallest
    number, which a division would round, is not rounded before the sum.
    """
    return tensor.is_cuda and num_ranks & (num_ranks - 1) == 0 and "nccl" in dist.get_backend(group)
