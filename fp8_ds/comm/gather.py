"""Gather a compact buffer whose runs are uneven, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import all_gather, all_to_all, broadcast
from fp8_ds.comm.layout import ShardRange

MAX_PADDING = 1.02
"""An uneven gather is padded to equal shares where that moves at most this factor more."""
MAX_BROADCASTS = 16
"""Largest number of owners that each broadcast their run: NCCL runs broadcasts one after another, each around the ring
of all ranks. With more owners shares are balanced first."""
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
