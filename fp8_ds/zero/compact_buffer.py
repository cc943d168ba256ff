"""CompactBuffer: the buffer of one kind in ZeRO-1 and 2, laid out by comm/layout.py, and its gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.gather import gather_runs
from fp8_ds.comm.layout import CompactLayout, ShardRange, compact_layout
from fp8_ds.numerics.formats import E4M3

FP8_ALIGNMENT = 16
HP_ALIGNMENT = 8
"""Alignment in elements: tensors of either kind start at a multiple of 16 bytes: FP8 GEMMs read 16 at a time."""


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
