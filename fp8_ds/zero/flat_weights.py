"""Flat tensors of ZeRO-1 and 2: `FlatWeights`, in compact buffers, and `FlatMasters12`, DeepSpeed's float32 masters.

Loads set the masters. Other writes of users hold until the next step, which starts from the masters, unless
`_restore_from_bit16_weights` (DeepSpeed's `refresh_fp32_params`) makes masters of them first. Until then each rank
keeps its elements as they were written, for FP8 bytes round them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.comm.gather import CompactBuffer
from fp8_ds.comm.layout import Fragment
from fp8_ds.nn.linear.parameter import point_at_bf16
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.numerics.new_masters import CHANCE, same_bits
from fp8_ds.zero.stage import Host12

_HP_FREE_BYTES = 1 << 20


class Place(NamedTuple):
    """An FP8 weight: its parameter group, its number among the group's FP8 weights, and in the scale vectors."""

    group: int
    number: int
    slot: int


@dataclass
class GroupWeights:
    """Buffers of one parameter group.

    Attributes:
        fp8: bytes of the weights that are in FP8.
        hp: the other parameters, bf16.
        bf16: weights of `fp8` whose layers compute in bf16; None until there is a choice of these.
    """

    fp8: CompactBuffer
    hp: CompactBuffer
    bf16: CompactBuffer | None = None

    @property
    def is_all_bf16(self) -> bool:
        """Whether no layer reads the FP8 bytes."""
        num = 0 if self.bf16 is None else len(self.bf16.params)
        return 0 < num == len(self.fp8.params)

    @property
    def buffers(self) -> list[CompactBuffer]:
        return [kind for kind in (self.fp8, self.hp, self.bf16) if kind is not None]


class FlatWeights:
    """Weights of the optimizer `host` on this rank, whole.

    Attributes:
        groups: of each parameter group, as far as they are made.
    """

    def __init__(self, host: Host12, counter: ByteCounter) -> None:
        self._host = host
        self._counter = counter
        self.groups: list[GroupWeights] = []

    @property
    def params(self) -> Iterator[Any]:
        """FP8 weights in the order of the scale vectors: groups, then flat order."""
        return (p for group in self.groups for p in group.fp8.params)

    @property
    def places(self) -> Iterator[Place]:
        """Places of FP8 weights, in the order of `params`."""
        pairs = ((i, index) for i, group in enumerate(self.groups) for index in range(len(group.fp8.params)))
        return (Place(i, index, slot) for slot, (i, index) in enumerate(pairs))

    def payload(self, place: Place) -> Fp8Payload:
        payload: Fp8Payload = self.groups[place.group].fp8.params[place.number]._fp8
        return payload

    def own(self, place: Place) -> Fragment | None:
        """Return the part of an FP8 weight that this rank owns."""
        return self.groups[place.group].fp8.own_of.get(place.number)

    def make_buffer(self, i: int, chosen: Sequence[bool], dtype: torch.dtype, device: torch.device) -> CompactBuffer:
        """Make an empty buffer for the `chosen` parameters of group `i`, which is in flat order."""
        places = zip(self._host.round_robin_bit16_groups[i], _flat_offsets(self._host, i), chosen, strict=True)
        found = [(p, start) for p, start, is_chosen in places if is_chosen]
        size, group = int(self._host.partition_size[i]), self._host.real_dp_process_group[i]
        return CompactBuffer([p for p, _ in found], [start for _, start in found], size, group, dtype, device)

    def gather(self, fill_bf16: Callable[[int, CompactBuffer], None]) -> None:
        """Gather bf16 parameters, bf16 for layers in bf16, and FP8 bytes of groups with layers in FP8. Collective.

        Args:
            fill_bf16: copies this rank's masters of a group to a buffer of layers in bf16.
        """
        for group in self.groups:
            if not group.is_all_bf16:
                self._counter.fp8 += group.fp8.gather()
            self._counter.hp += group.hp.gather(_HP_FREE_BYTES)
        for i, group in enumerate(self.groups):
            if group.bf16 is not None:
                fill_bf16(i, group.bf16)
                self._counter.hp += group.bf16.gather(_HP_FREE_BYTES)
        self.point_params(keep_values=False)
        for p in self.params:
            p._fp8.version += 1

    @torch.no_grad()
    def point_params(self, keep_values: bool) -> None:
        """Point parameters that are not in FP8 into their buffers, also where a user has assigned `p.data`.

        Args:
            keep_values: whether assigned values go into the buffer; else the buffer's stay, as in DeepSpeed.
        """
        kinds = [group.hp for group in self.groups]
        strays = [(hp.view(i), hp.params[i], hp.params[i].data.clone()) for hp in kinds for i in hp.strays()]
        for view, p, value in strays:  # all were cloned first: two may have been exchanged
            if keep_values and value.shape == view.shape:
                view.copy_(value)
            p.data = view

    @torch.no_grad()
    def set_bf16(self, names: Collection[str], fill_bf16: Callable[[int, CompactBuffer], None]) -> None:
        """Keep bf16 of the weights `names`, and of no others, beside their bytes. Collective.

        `fill_bf16`: as in `gather`.
        """
        skipped = [group for group in self.groups if group.is_all_bf16]
        for group in self.groups:
            group.bf16 = None  # what was there is freed first
        for p in self.params:
            point_at_bf16(p, None)
            p._fp8.version += 1
        made = []
        for i, group in enumerate(self.groups):
            chosen = [hasattr(p, "_fp8") and p._fp8.name in names for p in self._host.round_robin_bit16_groups[i]]
            bf16 = self.make_buffer(i, chosen, group.hp.buffer.dtype, group.fp8.buffer.device)
            fill_bf16(i, bf16)
            bf16.gather(_HP_FREE_BYTES)
            for index, p in enumerate(bf16.params):
                point_at_bf16(p, bf16.view(index))
            made.append(bf16)
        for group, bf16 in zip(self.groups, made, strict=True):
            group.bf16 = bf16
        for group in skipped:
            if not group.is_all_bf16:
                group.fp8.gather()

    def move(self, device: torch.device) -> None:
        """Move the buffers and point every parameter into them again."""
        self.point_params(keep_values=True)
        for kind in (kind for group in self.groups for kind in group.buffers):
            kind.buffer = kind.buffer.to(device)
        for group in self.groups:
            for index, p in enumerate(group.fp8.params):
                p._fp8.data = group.fp8.view(index)
            for index, p in enumerate(group.hp.params):
                p.data = group.hp.view(index)
            for index, p in enumerate([] if group.bf16 is None else group.bf16.params):
                assert group.bf16 is not None
                point_at_bf16(p, group.bf16.view(index))

    def resident_bytes(self) -> dict[str, int]:
        """Return this rank's bytes of FP8 weights and of bf16 parameters, and how many weights are FP8."""
        fp8 = sum(group.fp8.buffer.nbytes for group in self.groups)
        return {
            "fp8": fp8,
            "hp": sum(kind.buffer.nbytes for group in self.groups for kind in group.buffers) - fp8,
            "num_fp8_weights": sum(p.numel() for p in self.params),
        }


class Written(NamedTuple):
    """This rank's elements of an FP8 weight that a user has written since the last step, 1-D.

    Attributes:
        values: bf16, as they were written; bf16 of the master for elements that were written as they were read.
        kept: bool, true for the latter.
    """

    values: Tensor
    kept: Tensor


class FlatMasters12:
    """This rank's partitions of masters, float32: always, or while masters that are split are dense."""

    def __init__(self, host: Host12, weights: FlatWeights) -> None:
        self._host = host
        self.weights = weights
        self._written: dict[int, Written] = {}  # by id of payload

    def partition(self, i: int) -> Tensor:
        """Return the masters of group `i`, 1-D, padding included."""
        master: Tensor = self._host.single_partition_of_fp32_groups[i]
        return master.detach()

    def read(self, place: Place, full: Tensor) -> None:
        """Fill this rank's elements of `full`, 1-D, with the master of an FP8 weight."""
        if (f := self.weights.own(place)) is not None:
            f.in_tensor.narrow(full).copy_(f.in_partition.narrow(self.partition(place.group)))

    def set(self, place: Place, flat: Tensor) -> None:
        """Make `flat` (1-D, whole) the master of an FP8 weight."""
        if (f := self.weights.own(place)) is not None:
            f.in_partition.narrow(self.partition(place.group)).copy_(f.in_tensor.narrow(flat))

    @torch.no_grad()
    def restore_stored(self, stored: Any) -> None:
        """Make masters of weights that came in FP8, `stored` by id, their codes times scales: bf16 has rounded them."""
        for i, group in enumerate(self.weights.groups):
            for p, f in ((kind.params[f.index], f) for kind in (group.fp8, group.hp) for f in kind.own):
                if id(p) in stored:
                    stored[id(p)].restore_(f.in_partition.narrow(self.partition(i)), f.in_tensor.start)

    @torch.no_grad()
    def take_hp(self) -> None:
        """Set masters of parameters that are not in FP8 to their values, except masters that round to these."""
        for i, group in enumerate(self.weights.groups):
            for f in group.hp.own:
                master, piece = f.in_partition.narrow(self.partition(i)), f.in_buffer.narrow(group.hp.buffer)
                master.copy_(torch.where(master.to(piece.dtype) == piece, master, piece.float()))

    @torch.no_grad()
    def take_weights(self) -> None:
        """Set masters from the model's weights, where these are the newer.

        An FP8 weight that a user wrote gives its master the bf16 values that were written, without an FP8 rounding;
        elements that were written as they were read keep theirs.
        """
        self.weights.point_params(keep_values=True)
        for i, group in enumerate(self.weights.groups):
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
        payload, f = self.weights.payload(place), self.weights.own(place)
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


def _flat_offsets(host: Host12, i: int) -> list[int]:
    """Return the first element of each parameter of group `i` in the flat group, in flat order.

    DeepSpeed 0.19 stores these offsets (parameters may be padded to 16 bytes); before, parameters lie without gaps.
    """
    offsets = getattr(host, "round_robin_bit16_offsets", None)
    if offsets is not None:
        return list(offsets[i])
    starts, end = [], 0
    for p in host.round_robin_bit16_groups[i]:
        starts.append(end)
        end += p.numel()
    return starts
