"""Zero12: FP8 of one ZeRO-1/2 optimizer: its weights, masters, gradients and step, and who reads and writes weights.

Weights are resident in one byte, and gathered in one byte. DeepSpeed builds its optimizer; then the bf16 flat buffers
are taken away, and compact buffers remain (flat_weights.py). `bit16_groups_flat` becomes meta tensors of the same
numel: DeepSpeed may still narrow them and copy into them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.gather import CompactBuffer, gather_runs
from fp8_ds.nn.linear.parameter import retype
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.stored import freeze
from fp8_ds.numerics.formats import E4M3
from fp8_ds.zero.flat_weights import FlatMasters12, FlatWeights, GroupWeights, Place
from fp8_ds.zero.gradients import BucketedGradients, GradientsOfOneRank, ReleasedGradients, has_one_rank
from fp8_ds.zero.masters12 import Fp32Masters12, SplitMasters12
from fp8_ds.zero.release import ReleaseUpdater, make_release
from fp8_ds.zero.stage import Fp8Context, Host12
from fp8_ds.zero.step import Step12, expect_patched_gather
from fp8_ds.zero.zero import Zero


class OwnedGroups(list[Tensor]):
    """`bit16_groups_flat` of an FP8 optimizer: the gather recognises it and calls its owner instead."""

    owner: weakref.ref[Zero12]


class Zero12(Zero):
    """FP8 of the optimizer `host` of stage 1 or 2. Collective, here and in all methods that gather.

    Attributes:
        weights: all weights, in FP8 and bf16.
        flat: DeepSpeed's flat masters.
        masters: of this rank's partitions.
        step: updates the masters.
        gradients: what happens to a gradient until then.
        is_exporting: whether readers get bf16 of the masters.
    """

    host: Host12

    def __init__(self, host: Host12, context: Fp8Context) -> None:
        super().__init__(host, context)
        self.weights = FlatWeights(host, context.counter)
        self.flat = FlatMasters12(host, self.weights)
        self.is_exporting = False
        names = {id(p): name for name, p in context.trainable.items()}
        params = [p for group in host.round_robin_bit16_groups for p in group if id(p) in names]
        self.masters: Fp32Masters12 | SplitMasters12 = (SplitMasters12 if self.has_states else Fp32Masters12)(
            host, context, self.flat, params
        )
        owned = OwnedGroups(host.bit16_groups_flat)
        owned.owner = weakref.ref(self)
        host.bit16_groups_flat = owned
        first = 0
        for i in range(len(host.bit16_groups)):
            first += self._take_group(i, names, first)
        for name, p in context.frozen.items():
            freeze(name, p, context.granularity, context.stored.get(id(p)))
        self.masters.start()
        self.refresh(is_step=False)
        states, num_parameters = self.masters.states, sum(map(len, host.bit16_groups))
        release = None if states is None else make_release(host, context, states, num_parameters)
        self.step = Step12(host, context, states, release, self.weights, self.refresh)
        self.gradients = self._make_gradients(release)

    def _make_gradients(self, release: ReleaseUpdater | None) -> BucketedGradients:
        host, adam = self.host, self.step.adam
        if release is not None:
            return ReleasedGradients(host, release)
        takes_them = self.masters.states is not None or (adam is not None and adam.knows_it)
        return GradientsOfOneRank(host) if takes_them and has_one_rank(host) else BucketedGradients(host)

    def _take_group(self, i: int, names: dict[int, str], first: int) -> int:
        """Move group `i` out of the flat buffer and drop it; return its number of FP8 weights.

        The order keeps the peak low: bf16 parameters move, the flat buffer goes, and only then come FP8 bytes. With
        split masters it stays until these are encoded.

        Args:
            names: those of trainable FP8 weights, by id.
            first: number of FP8 weights in the groups before.
        """
        host = self.host
        flat: Tensor = host.bit16_groups_flat[i]
        params, dtype, device = host.round_robin_bit16_groups[i], flat.dtype, flat.device
        is_fp8 = [id(p) in names for p in params]
        hp = self.weights.make_buffer(i, [not here for here in is_fp8], dtype, device)
        for index, p in enumerate(hp.params):
            hp.view(index).copy_(p.data)
            p.data = hp.view(index)
        for p in host.bit16_groups[i]:
            if getattr(p, "_hp_mapping", None) is not None:
                p._hp_mapping.lp_fragment = None
        weights = [p for p, here in zip(params, is_fp8, strict=True) if here]
        for slot, p in enumerate(weights, first):
            scale, scale_inv = self.masters.scales.scale[slot], self.masters.scales.scale_inv[slot]
            retype(p, Fp8Payload(names[id(p)], scale, scale_inv, dtype, device))
        host.bit16_groups_flat[i] = torch.empty(flat.numel(), dtype=dtype, device="meta")
        host.parallel_partitioned_bit16_groups[i] = list(host.bit16_groups_flat[i].split(int(host.partition_size[i])))
        bf16 = flat if self.masters.needs_bf16 else None
        del flat
        group = GroupWeights(self.weights.make_buffer(i, is_fp8, E4M3.torch_dtype, device), hp)
        self.masters.encode(i, bf16, group)
        for index, p in enumerate(weights):
            p._fp8.data = group.fp8.view(index)
            p._fp8.write = partial(_write, weakref.ref(self), Place(i, index, first + index))
        self.weights.groups.append(group)
        return len(weights)

    @torch.no_grad()
    def refresh(self, is_step: bool) -> None:
        """Update the weights on all ranks from the masters, unless it `is_held`: quantise, copy bf16, gather both."""
        if self.is_held:
            return
        self.masters.update_bytes(is_step)
        self.weights.gather(self.masters.fill_bf16)
        if is_step:
            self.context.counter.end_step()
        self.masters.end_refresh(is_step)
        self.flat.forget_written()

    def set_bf16(self, names: Collection[str]) -> None:
        """Keep bf16 of the masters of the weights `names`, and of no others, beside their bytes.

        Values that a user has written since the last step hold.
        """

        def fill(i: int, bf16: CompactBuffer) -> None:
            self.masters.fill_bf16(i, bf16)
            self.flat.fill_written(bf16)

        self.weights.set_bf16(names, fill)

    def load_state_dict(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load as DeepSpeed does, then quantise; a universal load ends with our gather.

        Raises:
            UnsupportedError: it is universal, and the gather is DeepSpeed's own again. Nothing has changed.
        """
        if kwargs.get("checkpoint_folder") is not None:
            expect_patched_gather()
        with self.dense():
            original(*args, **kwargs)
            self.refresh(is_step=False)
        if self.step.adam is not None:
            self.step.adam.forget_counts()

    def load(self) -> AbstractContextManager[None]:
        """Make values written into FP8 weights inside the block their masters, bit for bit."""
        return self.masters.load()

    def resident_bytes(self) -> dict[str, int]:
        """Return this rank's bytes of FP8 weights and of bf16 parameters, and how many weights are FP8."""
        num_frozen = sum(p.numel() for p in self.context.frozen.values())  # in no partition
        found = self.weights.resident_bytes()
        return found | {key: found[key] + num_frozen for key in ("fp8", "num_fp8_weights")}

    def restore_masters(self) -> None:
        """Set masters from the model's weights, where these are the newer (a module-only load)."""
        with self.dense():
            self.flat.take_weights()
            self.refresh(is_step=False)

    def link(self, original: Callable[[], None]) -> None:
        """Link fp32 fragments as DeepSpeed does, without a bf16 copy of each weight behind `lp_fragment`."""
        weights = self.context.trainable.values()
        for p in weights:
            p._fp8.export = p._fp8.placeholder.expand(p.numel())  # type: ignore[attr-defined]
        try:
            original()
        finally:
            for p in weights:
                p._fp8.export = None  # type: ignore[attr-defined]
        for p in (p for group in self.host.bit16_groups for p in group):
            if getattr(p, "_hp_mapping", None) is not None:
                p._hp_mapping.lp_fragment = None
        self.masters.point()
        self.masters.link()
        self.gradients.link()

    def move(self, device: torch.device) -> None:
        self.weights.move(device)

    @contextmanager
    def export(self, wanted: bool, on_device: bool = False, with_frozen: bool | None = None) -> Iterator[None]:
        """Give readers of FP8 weights bf16 of the masters inside the block, bitwise. Collective on entry.

        Args:
            wanted: whether this rank reads them; elsewhere readers get meta tensors, or one NaN expanded on the CPU for
                a weight that a user has frozen: DeepSpeed's saves copy it there on every rank.
            on_device: whether readers get them on the weights' device, at 2 bytes a weight, and not on the CPU.
            with_frozen: whether frozen weights are wanted, in bf16 on the CPU: a state dict would hold bf16 of all of
                them on the device. None: they are read as ever.
        """
        payloads: list[Fp8Payload] = []
        self.is_exporting = True
        try:
            for place, p in zip(self.weights.places, self.weights.params, strict=True):
                full = self._gather_master(place)
                if wanted:
                    p._fp8.export = full if on_device else full.cpu()
                elif p.requires_grad:
                    p._fp8.export = torch.empty_like(full, device="meta")
                else:
                    p._fp8.export = p._fp8.placeholder.cpu().expand(full.shape)
                payloads.append(p._fp8)
            frozen: Any = self.context.frozen.values() if with_frozen is not None else ()
            for payload in (p._fp8 for p in frozen):
                nothing = payload.placeholder.cpu().expand(payload.data.shape)
                payload.export = payload.dequantize().cpu() if wanted and with_frozen else nothing
                payloads.append(payload)
            yield
        finally:
            self.is_exporting = False
            for payload in payloads:
                payload.export = None

    def _gather_master(self, place: Place) -> Tensor:
        """Return bf16 of the master of an FP8 weight, full shape, on every rank."""
        kind = self.weights.groups[place.group].fp8
        numel, dtype = kind.layout.in_buffer[place.number].numel, kind.params[place.number].dtype
        full = torch.zeros(numel, dtype=dtype, device=kind.buffer.device)
        self.masters.read(place, full)
        gather_runs(kind.group, full, kind.layout.runs_of(place.number))
        return full.view(kind.shapes[place.number])


@torch.no_grad()
def _write(zero: weakref.ref[Zero12], place: Place, value: Tensor) -> None:
    """Write `value` to a weight's bytes, and on a load to its master; called as `payload.write`."""
    owner = zero()
    assert owner is not None
    owner.masters.write(place, value.contiguous().view(-1))


def patched_all_gather(original: Any) -> Any:
    """Wrap `all_gather_dp_groups`: an FP8 optimizer's groups go to their owner, all others to DeepSpeed's own."""

    def all_gather_dp_groups(groups_flat: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(groups_flat, OwnedGroups):
            owner = groups_flat.owner()
            assert owner is not None
            return owner.refresh(is_step=owner.step.in_deepspeed)
        return original(groups_flat, *args, **kwargs)

    all_gather_dp_groups.fp8_ds_original = original  # type: ignore[attr-defined]
    return all_gather_dp_groups
