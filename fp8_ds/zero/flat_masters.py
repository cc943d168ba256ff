"""DeepSpeed's flat float32 masters: `FlatMasters12`, with what users write in between of steps, and `FlatMasters3`.

Loads set the masters. Other writes hold until the next step, which starts from the masters, unless
`_restore_from_bit16_weights` (DeepSpeed's `refresh_fp32_params`) makes masters of them first. Until then each rank of
ZeRO-1 and 2 keeps its elements as they were written, for FP8 bytes round them; ZeRO-3 has bf16 shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.comm.gather import CompactBuffer
from fp8_ds.numerics.new_masters import CHANCE, newer, same_bits
from fp8_ds.zero.flat_weights import FlatWeights, Place
from fp8_ds.zero.host import Host3, Host12
from fp8_ds.zero.sharded import Bf16Shard, Fp8Shards, own_elements


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


class FlatMasters3:
    """Flat masters and bf16 shards of the optimizer `host`, by parameter.

    Attributes:
        device: of the masters, at the start.
        is_live: whether DeepSpeed's flat bf16 buffer exists. Without it, parameters that are not FP8 have bf16 shards
            of their own.
        shards: the FP8 weights; set once they are made.
    """

    shards: Fp8Shards

    def __init__(self, host: Host3) -> None:
        self._host = host
        self.device: torch.device = host.fp32_partitioned_groups_flat[0].device
        self.is_live = True
        self._places: dict[int, tuple[int, int]] = {}  # by id
        for i, group in enumerate(host.fp16_groups):
            starts = accumulate((p.ds_tensor.ds_numel for p in group), initial=0)
            self._places.update((id(p), (i, start)) for p, start in zip(group, starts, strict=False))

    @property
    def params(self) -> Iterator[Any]:
        return (p for group in self._host.fp16_groups for p in group)

    def place(self, p: Any) -> tuple[int, int]:
        """Return the sub-group of a trainable parameter, and where its shard starts in the flat master."""
        return self._places[id(p)]

    def master(self, p: Any, padded: bool = False) -> Tensor:
        """Return this rank's masters of `p` in the flat tensor, a view, 1-D; without padding unless it is asked for."""
        group, start = self._places[id(p)]
        numel = p.ds_tensor.ds_numel if padded else own_elements(p).numel
        flat: Tensor = self._host.fp32_partitioned_groups_flat[group].detach()
        return flat.narrow(0, start, numel)

    @torch.no_grad()
    def restore_stored(self, stored: Any) -> None:
        """Make masters of weights that came in FP8, `stored` by id, their codes times scales: bf16 has rounded them."""
        for p in self.params:
            if id(p) in stored:
                stored[id(p)].restore_(self.master(p), own_elements(p).start)

    def copy_masters(self, group: int) -> None:
        """Copy the masters of a sub-group to its bf16 shards, for parameters that are not FP8."""
        params = self._host.fp16_groups[group]
        flat = self._host.fp32_partitioned_groups_flat[group].detach()
        pairs = zip(params, flat.split([p.ds_tensor.ds_numel for p in params]), strict=False)
        found = [(p.ds_tensor.data, master) for p, master in pairs if self.shards.get(p) is None]
        if found:
            torch._foreach_copy_([bf16 for bf16, _ in found], [master for _, master in found])

    def drop(self, remake: bool = False) -> None:
        """Put a meta tensor in place of the flat bf16 buffer; parameters that are not FP8 get their own bf16 shards.

        Args:
            remake: whether to make these from the masters after the flat buffer is freed; else they are copied.
        """
        host = self._host
        others = [p for p in self.params if self.shards.get(p) is None]
        for p in others:
            p.ds_tensor.data = p.ds_tensor.data.new_empty(0) if remake else p.ds_tensor.data.clone()
        for i, flat in enumerate(host.fp16_partitioned_groups_flat):
            host.fp16_partitioned_groups_flat[i] = torch.empty(flat.numel(), dtype=flat.dtype, device="meta")
        for weight in self.shards.weights:
            if not weight.keeps_bf16:
                weight.drop_bf16()
            elif weight.in_bf16:
                weight.param.ds_tensor.data = weight.param.ds_tensor.data.clone()
        # On its own device: masters are on the CPU in a load of FP8 states.
        host.lp_param_buffer = host.lp_param_buffer.new_empty(0)
        self.is_live = False
        for p in others if remake else ():
            p.ds_tensor.data = self.master(p, padded=True).to(p.dtype)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore DeepSpeed's flat bf16 buffer inside the block, filled from the masters."""
        host = self._host
        numels = [flat.numel() for flat in host.fp16_partitioned_groups_flat]
        host.lp_param_buffer = host.lp_param_buffer.new_empty(sum(numels))
        for i, flat in enumerate(host.lp_param_buffer.split(numels)):
            flat.copy_(host.fp32_partitioned_groups_flat[i].detach())
            host.fp16_partitioned_groups_flat[i] = flat
            pieces = flat.split([p.ds_tensor.ds_numel for p in host.fp16_groups[i]])
            for p, piece in zip(host.fp16_groups[i], pieces, strict=True):
                p.ds_tensor.data = piece
        self.is_live = True
        try:
            yield
        finally:
            self.drop()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Set masters from bf16 shards where these are the newer; a weight that nobody wrote keeps its precision."""
        for p in self.params:
            weight = self.shards.get(p)
            if weight is None:
                master, written = self.master(p, padded=True), p.ds_tensor.data
            elif self.is_live or weight.bf16_shard is Bf16Shard.WRITTEN:
                master, written = self.master(p), weight.bf16
            else:
                continue
            master.copy_(newer(master, written.to(master.device)))
