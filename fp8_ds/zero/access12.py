"""ZeRO-1 and 2: reads and writes of FP8 weights. Exports get bf16 of the masters, loads set the masters.

Other writes hold until the next step, which starts from the masters, unless `_restore_from_bit16_weights` (DeepSpeed's
`refresh_fp32_params`) makes masters of them first. Until then each rank keeps its elements as they were written, for
FP8 bytes round them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.comm.gather import gather_runs
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.optim.user_writes import CHANCE
from fp8_ds.zero.sharded import same_bits


class Written(NamedTuple):
    """This rank's elements of an FP8 weight that a user has written since the last step, 1-D.

    Attributes:
        values: bf16, as they were written; bf16 of the master for elements that were written as they were read.
        kept: bool, true for the latter.
    """

    values: Tensor
    kept: Tensor


class Fp8AccessStage12:
    """Base of `Fp8ZeroStage12`, which has the compact buffers."""

    _fp8_loading = False
    fp8_is_exporting = False

    @contextmanager
    def fp8_dense(self: Any) -> Iterator[dict[str, Tensor]]:
        """Do nothing: masters and moments are dense here. Subclasses with FP8 states override it."""
        yield {}

    @contextmanager
    def fp8_export(self: Any, wanted: bool, on_device: bool = False, with_frozen: bool | None = None) -> Iterator[None]:
        """Give readers of FP8 weights bf16 of the masters inside the block, bitwise. Collective on entry.

        Args:
            wanted: whether this rank reads them; elsewhere readers get meta tensors, or one NaN expanded on the CPU for
                a weight that a user has frozen: DeepSpeed's saves copy it there on every rank.
            on_device: whether readers get them on the weights' device, at 2 bytes a weight, and not on the CPU.
            with_frozen: whether frozen weights are wanted, in bf16 on the CPU: a state dict would hold bf16 of all of
                them on the device. None: they are read as ever.
        """
        payloads: list[Fp8Payload] = []
        self.fp8_is_exporting = True
        try:
            for i, kind in enumerate(self._fp8_kinds):
                for index, p in enumerate(kind.params):
                    full = self._fp8_gather_master(i, index)
                    if wanted:
                        p._fp8.export = full if on_device else full.cpu()
                    elif p.requires_grad:
                        p._fp8.export = torch.empty_like(full, device="meta")
                    else:
                        p._fp8.export = p._fp8.placeholder.cpu().expand(full.shape)
                    payloads.append(p._fp8)
            for payload in (p._fp8 for p in self._fp8.frozen.values() if with_frozen is not None):
                nothing = payload.placeholder.cpu().expand(payload.data.shape)
                payload.export = payload.dequantize().cpu() if wanted and with_frozen else nothing
                payloads.append(payload)
            yield
        finally:
            self.fp8_is_exporting = False
            for payload in payloads:
                payload.export = None

    def _fp8_gather_master(self: Any, i: int, index: int) -> Tensor:
        """Return bf16 of the master of weight `index` of group `i`, full shape, on every rank."""
        kind = self._fp8_kinds[i]
        numel = kind.layout.in_buffer[index].numel
        full = torch.zeros(numel, dtype=kind.params[index].dtype, device=kind.buffer.device)
        self._fp8_read_master(i, index, full)
        gather_runs(kind.group, full, kind.layout.runs_of(index))
        return full.view(kind.shapes[index])

    def _fp8_read_master(self: Any, i: int, index: int, full: Tensor) -> None:
        """Fill this rank's elements of `full`, 1-D, with the master of weight `index` of group `i`."""
        if (f := self._fp8_kinds[i].own_of.get(index)) is not None:
            master = self.single_partition_of_fp32_groups[i].detach()
            f.in_tensor.narrow(full).copy_(f.in_partition.narrow(master))

    @contextmanager
    def fp8_load(self: Any) -> Iterator[None]:
        """Make values written into FP8 weights inside the block their masters, bit for bit. At the end the other
        parameters' values become their masters: a model is loaded as a whole."""
        self._fp8_loading = True
        try:
            yield
            self._fp8_point_params(keep_values=True)
            self._fp8_take_over_bf16()
        finally:
            self._fp8_loading = False

    @torch.no_grad()
    def _fp8_take_over_bf16(self: Any) -> None:
        """Set masters of parameters that are not in FP8 to their values, except masters that round to these."""
        for i, hp in enumerate(self._hp_kinds):
            for f in hp.own:
                master = f.in_partition.narrow(self.single_partition_of_fp32_groups[i].data)
                piece = f.in_buffer.narrow(hp.buffer)
                master.copy_(torch.where(master.to(piece.dtype) == piece, master, piece.float()))

    def _fp8_write(self: Any, group_index: int, index: int, slot: int, flat: Tensor) -> None:
        """Write `flat` (1-D) to weight `index` of a group, whose scale is at `slot` of the scale vectors."""
        quantizer, payload = self._fp8_quantizer, self._fp8_kinds[group_index].params[index]._fp8
        if not self._fp8_loading:
            self._fp8_keep_written(group_index, index, flat)
        quantizer.rescale(slot, quantizer.amax_of(slot, flat))
        quantizer.quantize_into(payload.data.view(-1), flat, slot)
        if payload.hp is not None:
            payload.hp.view(-1).copy_(flat)
        self._fp8_take_over(group_index, index, flat)

    def _fp8_keep_written(self: Any, group_index: int, index: int, flat: Tensor) -> None:
        """Keep this rank's elements of `flat` (1-D), which a user is about to write into weight `index` of a group."""
        kind = self._fp8_kinds[group_index]
        payload, f = kind.params[index]._fp8, kind.own_of.get(index)
        if f is None:
            return
        flat = flat.to(payload.dtype)
        same = same_bits(flat, payload.dequantize().view(-1))
        if int(same.sum()) < CHANCE * same.numel():
            same.zero_()
        values, same = map(f.in_tensor.narrow, (flat, same))
        before = self._fp8_overwritten.get(id(payload))
        if before is None:
            master = f.in_partition.narrow(self.single_partition_of_fp32_groups[group_index].data).to(flat)
            before = Written(master, torch.ones_like(same))
        self._fp8_overwritten[id(payload)] = Written(torch.where(same, before.values, values), same & before.kept)

    def _fp8_take_over(self: Any, group_index: int, index: int, flat: Tensor) -> None:
        """Make `flat` (1-D), whose bytes are written, the master of weight `index` of a group inside `fp8_load`."""
        f = self._fp8_kinds[group_index].own_of.get(index)
        if self._fp8_loading and f is not None:
            master = self.single_partition_of_fp32_groups[group_index].data
            f.in_partition.narrow(master).copy_(f.in_tensor.narrow(flat))

    @torch.no_grad()
    def _restore_from_bit16_weights(self: Any) -> None:
        """Set masters from the model's weights, where these are the newer (a module-only load).

        An FP8 weight that a user wrote gives its master the bf16 values that were written, without an FP8 rounding;
        elements that were written as they were read keep theirs.
        """
        self._fp8_point_params(keep_values=True)
        for i, (fp8, hp) in enumerate(zip(self._fp8_kinds, self._hp_kinds, strict=True)):
            master = self.single_partition_of_fp32_groups[i].data
            for f in fp8.own:
                written = self._fp8_overwritten.get(id(fp8.params[f.index]._fp8))
                if written is not None:
                    part = f.in_partition.narrow(master)
                    values, kept = (x.to(part.device) for x in written)
                    part.copy_(torch.where(kept, part, values.to(part.dtype)))
            for f in hp.own:
                f.in_partition.narrow(master).copy_(f.in_buffer.narrow(hp.buffer))
        self._fp8_refresh(is_step=False)


@torch.no_grad()
def write_through(owner: weakref.ref[Any], group_index: int, index: int, slot: int, value: Tensor) -> None:
    """Write `value` to a weight's bytes, and on a load to its master; called as `payload.write`."""
    optimizer = owner()
    assert optimizer is not None
    optimizer._fp8_write(group_index, index, slot, value.contiguous().view(-1))
