"""Gathers of weights: a compact buffer with uneven runs, in place (ZeRO-1 and 2), and equal shards (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import all_gather, all_to_all, broadcast
from fp8_ds.comm.layout import CompactLayout, ShardRange, compact_layout
from fp8_ds.numerics.formats import E4M3

MAX_PADDING = 1.02
"""An uneven gather is padded to equal shares where that moves at most this factor more."""
MAX_BROADCASTS = 16
"""Largest number of owners that each broadcast their run: NCCL runs broadcasts one after another, each around the ring
of all ranks. With more owners shares are balanced first."""
FP8_ALIGNMENT = 16
HP_ALIGNMENT = 8
"""Alignment in elements: tensors of either kind start at a multiple of 16 bytes: FP8 GEMMs read 16 at a time."""
_BALANCED_ALIGNMENT = 128
"""Equal shares are a multiple of this many bytes, for NCCL's loads."""


def gather_method(runs: Sequence[ShardRange], num_ranks: int, element_size: int, free_bytes: int = 0) -> str:
    """Return how `gather_runs` moves these runs: "none", "even", "padded", "broadcast" or "balanced".

    Args:
        runs: non-empty runs in rank order.
        num_ranks: size of the group.
        element_size: bytes an element.
        free_bytes: pad, whatever the waste, if the padded volume is at most this: a small gather costs latency,
            not bytes.
    """
    if num_ranks == 1 or not runs:
        return "none"
    largest, total = max(run.numel for run in runs), sum(run.numel for run in runs)
    if len(runs) == num_ranks and total == largest * num_ranks and runs[-1].stop - runs[0].start == total:
        return "even"
    padded = largest * num_ranks
    if padded <= MAX_PADDING * total or padded * element_size <= free_bytes:
        return "padded"
    return "broadcast" if len(runs) <= MAX_BROADCASTS else "balanced"


def gathered_bytes(runs: Sequence[ShardRange], num_ranks: int, element_size: int, free_bytes: int = 0) -> int:
    """Return the bytes that `gather_runs` delivers to a rank, its own share included."""
    method = gather_method(runs, num_ranks, element_size, free_bytes)
    if method == "none":
        return 0
    if method == "padded":
        return max(run.numel for run in runs) * num_ranks * element_size
    if method == "balanced":
        num_bytes = (runs[-1].stop - runs[0].start) * element_size
        return num_bytes + _balanced_share(num_bytes, num_ranks)
    return sum(run.numel for run in runs) * element_size


def _balanced_share(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes of each rank's equal share; fewer than `num_ranks` times the alignment are left over."""
    return num_bytes // (num_ranks * _BALANCED_ALIGNMENT) * _BALANCED_ALIGNMENT


def equal_parts(owned: Sequence[ShardRange], part: int, rank: int) -> tuple[list[int], list[int]]:
    """Return how much of each rank's run lies in each rank's part of a whole.

    Args:
        owned: each rank's run of the whole, empty for a rank that owns nothing.
        part: size of a part; rank k has `[k * part, (k + 1) * part)`, and nobody what lies behind all parts.
        rank: this one.

    Returns:
        (elements of each rank's run in this rank's part, elements of this rank's run in each rank's part).
    """
    parts = [ShardRange(k * part, (k + 1) * part) for k in range(len(owned))]
    received = [run.intersect(parts[rank]).numel for run in owned]
    return received, [owned[rank].intersect(other).numel for other in parts]


def gather_runs(group: dist.ProcessGroup, buffer: Tensor, runs: Sequence[ShardRange], free_bytes: int = 0) -> int:
    """Copy every run of `buffer` from its owner to all ranks, in place. Collective.

    Equal runs take one in-place all-gather, nearly equal or small runs a padded staging buffer, and runs of a few
    owners one broadcast each, straight into place. (Padding to the largest share would move 1.15 bytes a weight on
    Llama-3-8B, whose first and last ranks own mostly embedding.) Runs of many owners take three collectives: an
    all-to-all between neighbours that splits the whole into equal shares, an in-place all-gather, and an all-reduce of
    the few bytes that do not divide.

    Args:
        group: process group; `ShardRange.rank` counts within it.
        buffer: 1-D, any dtype the backend moves (FP8 as uint8: gloo has no float8).
        runs: non-empty runs in rank order, not overlapping; the same on all ranks. Elements between two are padding.
        free_bytes: see `gather_method`.

    Returns:
        Bytes delivered to this rank, its own included.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    method = gather_method(runs, num_ranks, buffer.element_size(), free_bytes)
    if method == "even":
        own = runs[rank]
        whole = buffer.narrow(0, runs[0].start, own.numel * num_ranks)
        all_gather(whole, own.narrow(buffer), group)
    elif method == "padded":
        largest = max(run.numel for run in runs)
        staging = buffer.new_empty(num_ranks * largest)
        share = staging.narrow(0, rank * largest, largest)
        for run in runs:
            if run.rank == rank:
                share[: run.numel].copy_(run.narrow(buffer))
                share[run.numel :].zero_()
        all_gather(staging, share, group)
        others = [run for run in runs if run.rank != rank]
        if others:  # an empty list is an error of torch's
            torch._foreach_copy_(
                [run.narrow(buffer) for run in others],
                [staging.narrow(0, run.rank * largest, run.numel) for run in others],
            )
    elif method == "broadcast":
        for work in [broadcast(run.narrow(buffer), dist.get_global_rank(group, run.rank), group) for run in runs]:
            work.wait()
    elif method == "balanced":
        _gather_balanced(group, buffer, runs)
    return gathered_bytes(runs, num_ranks, buffer.element_size(), free_bytes)


def _gather_balanced(group: dist.ProcessGroup, buffer: Tensor, runs: Sequence[ShardRange]) -> None:
    """Gather the runs of many owners; padding between two runs comes from the owner of the first."""
    num_ranks, rank, size = dist.get_world_size(group), dist.get_rank(group), buffer.element_size()
    first = runs[0].start * size
    whole = buffer.view(torch.uint8)[first : runs[-1].stop * size]
    owned = [ShardRange(0, 0)] * num_ranks
    ends = [run.start * size - first for run in runs[1:]] + [whole.numel()]
    for run, end in zip(runs, ends, strict=True):
        owned[run.rank] = ShardRange(run.start * size - first, end)
    own = owned[rank]
    share = _balanced_share(whole.numel(), num_ranks)
    body = share * num_ranks
    if share:
        received, sent = equal_parts(owned, share, rank)
        arrived = whole.new_empty(share)
        all_to_all(arrived, whole.narrow(0, min(own.start, body), sum(sent)), group, received, sent)
        mine = whole.narrow(0, rank * share, share)
        mine.copy_(arrived)
        all_gather(whole[:body], mine, group)
    if body < whole.numel():
        rest = torch.zeros_like(whole[body:])
        part = own.intersect(ShardRange(body, whole.numel()))
        if part.numel:
            part.shift(-body).narrow(rest).copy_(part.narrow(whole))
        dist.all_reduce(rest, group=group)  # each byte comes from one owner, and zeros from all others
        whole[body:].copy_(rest)


def pieces_of(flat: Tensor, ranges: Sequence[ShardRange]) -> list[Tensor]:
    """Return views of ranges of `flat` (1-D), from one operator. They are in order and do not overlap."""
    sizes, end = [], 0
    for one in ranges:
        sizes += [one.start - end, one.numel]
        end = one.stop
    return list(flat.split([*sizes, flat.numel() - end]))[1:-1:2]


class CompactBuffer:
    """The compact buffer of one kind (FP8 or bf16) in one parameter group, and this rank's fragments in it (`own`)."""

    def __init__(
        self,
        params: list[Any],
        flat_starts: list[int],
        partition_size: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.params = params
        self.group = group
        self.shapes = [p.shape for p in params]
        alignment = FP8_ALIGNMENT if dtype == E4M3.dtype else HP_ALIGNMENT
        self.layout: CompactLayout = compact_layout(
            flat_starts, [p.numel() for p in params], partition_size, dist.get_world_size(group), alignment
        )
        self.own = self.layout.fragments[dist.get_rank(group)]
        self.own_of = {fragment.index: fragment for fragment in self.own}
        self.buffer = torch.zeros(self.layout.numel, dtype=dtype, device=device)

    def view(self, index: int) -> Tensor:
        """Return tensor `index` in its full shape."""
        return self.layout.in_buffer[index].narrow(self.buffer).view(self.shapes[index])

    def strays(self) -> list[int]:
        """Return the parameters that no longer are views of the buffer: somebody has assigned another `p.data`."""
        start, size, dtype = self.buffer.data_ptr(), self.buffer.element_size(), self.buffer.dtype
        places = enumerate(zip(self.params, self.layout.in_buffer, self.shapes, strict=True))
        return [
            index
            for index, (p, place, shape) in places
            if p.data_ptr() != start + size * place.start or p.shape != shape or p.dtype != dtype
        ]

    def copy_own(self, partition: Tensor) -> None:
        """Copy this rank's fragments out of its partition of the flat group."""
        if self.own:
            torch._foreach_copy_(
                pieces_of(self.buffer, [f.in_buffer for f in self.own]),
                pieces_of(partition, [f.in_partition for f in self.own]),
            )

    def gather(self, free_bytes: int = 0) -> int:
        """Fill the other ranks' runs and return the bytes delivered. Collective."""
        buffer = self.buffer.view(torch.uint8) if self.buffer.element_size() == 1 else self.buffer
        return gather_runs(self.group, buffer, self.layout.runs, free_bytes)


def adjacent(shards: list[Tensor]) -> Tensor | None:
    """Return a view of the bytes of 1-D float8 tensors if they lie one behind the other in one storage, else None."""
    first = shards[0]
    start = end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for shard in shards:
        if shard.storage_offset() != end or shard.untyped_storage().data_ptr() != storage:
            return None
        end += shard.numel()
    return first.view(torch.uint8).as_strided((end - start,), (1,), start)


def join_shards(buffer: Tensor, sizes: Sequence[int], num_ranks: int) -> list[Tensor]:
    """Copy shards of these sizes, which lie rank by rank in `buffer` (1-D), into one tensor each, in one launch."""
    whole = [buffer.new_empty(num_ranks * size) for size in sizes]
    by_rank = [one.view(num_ranks, -1) for one in whole]
    torch.split_with_sizes_copy(buffer.view(num_ranks, -1), sizes, dim=1, out=by_rank)
    return whole
