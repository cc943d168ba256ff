"""CompactLayout: where each tensor of one kind lies in a gather buffer, and which rank owns which bytes.

Pure arithmetic, no tensors. ZeRO-1/2 splits one flat group, FP8 weights and bf16 parameters mixed, into equal
partitions. Each kind gets a buffer of its own in the order of the flat group. Partitions are unchanged: a rank's share
of a kind is the part of that kind inside its partition, a contiguous *run* of the compact buffer. Runs are uneven.

Glossary: *flat*: DeepSpeed's group, in elements, padding included. *partition*: a rank's equal part of it. *slot*: a
tensor's place in the compact buffer. *fragment*: the intersection of a tensor and a partition. *run*: all fragments
of a rank, from the first one's start to the last one's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OUTSTANDING_UPDATE_BYTES = 1 << 26
"""With gradient release: the most memory of bucket buffers, with the copy that a reduction makes of one."""


@dataclass(frozen=True)
class Slot:
    """Place of one tensor: `start` in the compact buffer, `flat_start` in the flat group, both in elements."""

    start: int
    flat_start: int
    numel: int


@dataclass(frozen=True)
class Fragment:
    """The part of tensor `index` that one rank owns; all numbers in elements.

    `tensor_start` counts from the tensor's start, `compact_start` in the compact buffer, `partition_start` in the
    owner's partition of the flat group.
    """

    index: int
    tensor_start: int
    compact_start: int
    partition_start: int
    numel: int


@dataclass(frozen=True)
class ShardRange:
    """Contiguous elements `[start, stop)` of a compact buffer that `rank` (within the group) owns."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class CompactLayout:
    """Slots of one kind in flat order, the fragments of every rank, and the non-empty runs in rank order."""

    slots: tuple[Slot, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    runs: tuple[ShardRange, ...]
    numel: int

    def runs_of(self, index: int) -> tuple[ShardRange, ...]:
        """Return the fragments of tensor `index` as runs counted from the tensor's own start."""
        return tuple(
            ShardRange(rank, fragment.tensor_start, fragment.tensor_start + fragment.numel)
            for rank, owned in enumerate(self.fragments)
            for fragment in owned
            if fragment.index == index
        )


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
    slots: list[Slot] = []
    fragments: list[list[Fragment]] = [[] for _ in range(num_ranks)]
    compact_end = flat_end = 0
    for index, (flat_start, numel) in enumerate(zip(flat_starts, numels, strict=True)):
        assert flat_end <= flat_start <= num_ranks * partition_size - numel, (index, flat_start, numel)
        flat_end = flat_start + numel
        start = -(-compact_end // alignment) * alignment
        slots.append(Slot(start, flat_start, numel))
        compact_end = start + numel
        if numel == 0:
            continue
        for rank in range(flat_start // partition_size, (flat_end - 1) // partition_size + 1):
            owned_from = max(flat_start, rank * partition_size)
            owned_to = min(flat_end, (rank + 1) * partition_size)
            fragments[rank].append(
                Fragment(
                    index=index,
                    tensor_start=owned_from - flat_start,
                    compact_start=start + owned_from - flat_start,
                    partition_start=owned_from - rank * partition_size,
                    numel=owned_to - owned_from,
                )
            )
    runs = tuple(
        ShardRange(rank, owned[0].compact_start, owned[-1].compact_start + owned[-1].numel)
        for rank, owned in enumerate(fragments)
        if owned
    )
    return CompactLayout(tuple(slots), tuple(map(tuple, fragments)), runs, -(-compact_end // alignment) * alignment)
