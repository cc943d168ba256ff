"""DeepSpeed's flat float32 masters in ZeRO-1 and 2, and what users write into FP8 weights in between of steps.

Loads set the masters. Other writes hold until the next step, which starts from the masters, unless
`_restore_from_bit16_weights` (DeepSpeed's `refresh_fp32_params`) makes masters of them first. Until then each rank
keeps its elements as they were written, for FP8 bytes round them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.optim.user_writes import CHANCE
from fp8_ds.zero.compact_buffer import CompactBuffer
from fp8_ds.zero.flat_weights import FlatWeights, Place
from fp8_ds.zero.host import Host12
from fp8_ds.zero.sharded import same_bits


class Written(NamedTuple):
    """This rank's elements of an FP8 weight that a user has written since the last step, 1-D.

    Attributes:
        values: bf16, as they were written; bf16 of the master for elements that were written as they were read.
        kept: bool, true for the latter.
    """

    values: Tensor
    kept: Tensor


class FlatMasters:
    """This rank's partitions of masters, float32: always, or while masters that are split are dense."""

    def __init__(self, host: Host12, weights: FlatWeights) -> None:
        self._host = host
        self._weights = weights
        self._written: dict[int, Written] = {}  # by id of payload

    def partition(self, i: int) -> Tensor:
        """Return the masters of group `i`, 1-D, padding included."""
        master: Tensor = self._host.single_partition_of_fp32_groups[i]
        return master.detach()

    def read(self, place: Place, full: Tensor) -> None:
        """Fill this rank's elements of `full`, 1-D, with the master of an FP8 weight."""
        if (f := self._weights.own(place)) is not None:
            f.in_tensor.narrow(full).copy_(f.in_partition.narrow(self.partition(place.group)))

    def set(self, place: Place, flat: Tensor) -> None:
        """Make `flat` (1-D, whole) the master of an FP8 weight."""
        if (f := self._weights.own(place)) is not None:
            f.in_partition.narrow(self.partition(place.group)).copy_(f.in_tensor.narrow(flat))

    @torch.no_grad()
    def restore_stored(self, stored: Any) -> None:
        """Make masters of weights that came in FP8, `stored` by id, their codes times scales: bf16 has rounded them."""
        for i, group in enumerate(self._weights.groups):
            for p, f in ((kind.params[f.index], f) for kind in (group.fp8, group.hp) for f in kind.own):
                if id(p) in stored:
                    stored[id(p)].restore_(f.in_partition.narrow(self.partition(i)), f.in_tensor.start)

    @torch.no_grad()
    def take_hp(self) -> None:
        """Set masters of parameters that are not in FP8 to their values, except masters that round to these."""
        for i, group in enumerate(self._weights.groups):
            for f in group.hp.own:
                master, piece = f.in_partition.narrow(self.partition(i)), f.in_buffer.narrow(group.hp.buffer)
                master.copy_(torch.where(master.to(piece.dtype) == piece, master, piece.float()))

    @torch.no_grad()
    def take_weights(self) -> None:
        """Set masters from the model's weights, where these are the newer.

        An FP8 weight that a user wrote gives its master the bf16 values that were written, without an FP8 rounding;
        elements that were written as they were read keep theirs.
        """
        for i, group in enumerate(self._weights.groups):
            master = self.partition(i)
            for f in group.fp8.own:
                written = self._written.get(id(group.fp8.params[f.index]._fp8))
                if written is not None:
                    part = f.in_partition.narrow(master)
                    values, kept = (x.to(part.device) for x in written)
                    part.copy_(torch.where(kept, part, values.to(part.dtype)))
            for f in group.hp.own:
                f.in_partition.narrow(master).copy_(f.in_buffer.narrow(group.hp.buffer))

    @torch.no_grad()
    def keep_written(self, place: Place, flat: Tensor) -> None:
        """Keep this rank's elements of `flat` (1-D), which a user is about to write into an FP8 weight."""
        payload, f = self._weights.payload(place), self._weights.own(place)
        if f is None:
            return
        flat = flat.to(payload.dtype)
        same = same_bits(flat, payload.dequantize().view(-1))
        if int(same.sum()) < CHANCE * same.numel():
            same.zero_()
        values, same = map(f.in_tensor.narrow, (flat, same))
        before = self._written.get(id(payload))
        if before is None:
            master = f.in_partition.narrow(self.partition(place.group)).to(flat)
            before = Written(master, torch.ones_like(same))
        self._written[id(payload)] = Written(torch.where(same, before.values, values), same & before.kept)

    def fill_written(self, bf16: CompactBuffer) -> None:
        """Fill this rank's elements of weights in bf16 with what users have written."""
        for f in bf16.own:
            written = self._written.get(id(bf16.params[f.index]._fp8))
            if written is not None:
                f.in_buffer.narrow(bf16.buffer).copy_(written.values)

    def forget_written(self) -> None:
        """Begin a step: the masters count again."""
        self._written.clear()
