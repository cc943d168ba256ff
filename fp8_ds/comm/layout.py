"""Places of tensors in a gather buffer (`CompactLayout`), and the elements that a rank owns (`ShardRange`).

ZeRO-1/2 splits one flat group, FP8 weights and bf16 parameters mixed, into equal partitions. Each kind gets a buffer of
its own in the order of the flat group. Partitions are unchanged: a rank's share of a kind is the part of that kind
inside its partition, a contiguous *run* of the compact buffer. Runs are uneven.

Glossary: *flat*: DeepSpeed's group, in elements, padding included. *partition*: a rank's equal part of it. *buffer*:
the compact one. *fragment*: the intersection of a tensor and a partition. *run*: all fragments of a rank in the buffer,
from the first one's start to the last one's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `fp8-ds estimate` runs without torch
    from torch import Tensor

OUTSTANDING_UPDATE_BYTES = 1 << 26
"""With gradient release: the most memory of bucket buffers, with the copy that a reduction makes of one."""


@dataclass(frozen=True)
class ShardRange:
    """Contiguous elements `[start, stop)` of a tensor or buffer, or rows or columns.

    Args:
        rank: their owner within its group, where ranges of several ranks stand side by side.
    """

    start: int
    stop: int
    rank: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def shift(self, offset: int) -> ShardRange:
        """Return the same elements, counted from another origin."""
        return ShardRange(self.start + offset, self.stop + offset, self.rank)

    def intersect(self, other: ShardRange) -> ShardRange:
        """Return what both have, with the rank of this one; empty if there is nothing."""
        start = max(self.start, other.start)
        return ShardRange(start, max(start, min(self.stop, other.stop)), self.rank)

    def narrow(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return a view of this range of `x` along `dim`."""
        return x.narrow(dim, self.start, self.numel)


@dataclass(frozen=True)
class Fragment:
    """The part of tensor `index` that one rank owns: three ranges of the same elements, of the owner's rank.

    They count from the start of the tensor, of the compact buffer, and of the owner's partition of the flat group.
    """

    index: int
    in_tensor: ShardRange
    in_buffer: ShardRange
    in_partition: ShardRange


@dataclass(frozen=True)
class CompactLayout:
    """Places of the tensors of one kind in flat order, fragments of every rank, and non-empty runs in rank order."""

    in_flat: tuple[ShardRange, ...]
    in_buffer: tuple[ShardRange, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    runs: tuple[ShardRange, ...]
    numel: int

    def runs_of(self, index: int) -> tuple[ShardRange, ...]:
        """Return the fragments of tensor `index` as runs counted from the tensor's own start."""
        return tuple(one.in_tensor for owned in self.fragments for one in owned if one.index == index)


def aligned_starts(sizes: Sequence[int], alignment: int) -> list[int]:
    """Return the start of each piece, a multiple of `alignment`, and the end of the last one behind them."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // alignment) * alignment)
    return starts


def compact_layout(
    flat_starts: Sequence[int],
    numels: Sequence[int],
    partition_size: int,
    num_ranks: int,
    alignment: int,
) -> CompactLayout:
    """Lay the tensors out one after another, each starting at a multiple of `alignment` elements.

    Args:
        flat_starts: first element of each tensor in the flat group, ascending.
        numels: elements of each tensor (0 is allowed).
        partition_size: elements of the flat group that each rank owns.
        num_ranks: size of the ZeRO group.
    """
    in_flat = [ShardRange(start, start + numel) for start, numel in zip(flat_starts, numels, strict=True)]
    in_buffer: list[ShardRange] = []
    fragments: list[list[Fragment]] = [[] for _ in range(num_ranks)]
    end = flat_end = 0
    for index, flat in enumerate(in_flat):
        assert flat_end <= flat.start and flat.stop <= num_ranks * partition_size, (index, flat)
        flat_end = flat.stop
        start = -(-end // alignment) * alignment
        end = start + flat.numel
        in_buffer.append(ShardRange(start, end))
        for rank in range(flat.start // partition_size, -(-flat.stop // partition_size)):
            first = rank * partition_size
            own = ShardRange(first, first + partition_size, rank).intersect(flat)
            if own.numel:
                in_tensor = own.shift(-flat.start)
                fragments[rank].append(Fragment(index, in_tensor, in_tensor.shift(start), own.shift(-first)))
    runs = tuple(
        ShardRange(owned[0].in_buffer.start, owned[-1].in_buffer.stop, rank)
        for rank, owned in enumerate(fragments)
        if owned
    )
    numel = -(-end // alignment) * alignment
    return CompactLayout(tuple(in_flat), tuple(in_buffer), tuple(map(tuple, fragments)), runs, numel)
