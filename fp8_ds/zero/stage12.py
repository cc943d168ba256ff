"""ZeRO-1 and 2: mix-in for DeepSpeedZeroOptimizer. Weights resident in one byte, gathered in one byte.

DeepSpeed builds its optimizer; then `fp8_init` takes the bf16 flat buffers away. Two compact buffers remain for each
parameter group: FP8 bytes, and bf16 for the other parameters. `bit16_groups_flat` becomes a meta tensor of the same
numel: DeepSpeed may still narrow it and copy into it. Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.parameter import point_at_bf16, retype
from fp8_ds.nn.linear.payload import Fp8Payload, Granularity
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.numerics.formats import E4M3
from fp8_ds.zero.access12 import Fp8AccessStage12, Written, write_through
from fp8_ds.zero.compact_buffer import CompactBuffer
from fp8_ds.zero.one_pass import OnePassStage12
from fp8_ds.zero.stage import Fp8Context, offload_weights, reload_weights, split_lp_params
from fp8_ds.zero.weights import Part, WeightQuantizer

_HP_FREE_BYTES = 1 << 20


class OwnedGroups(list[Tensor]):
    """`bit16_groups_flat` of an FP8 optimizer: the gather recognises it and calls its owner instead."""

    owner: weakref.ref[Any]


class Fp8ZeroStage12(Fp8AccessStage12):
    """Mix-in before DeepSpeedZeroOptimizer in the class of a retyped optimizer."""

    _fp8: Fp8Context
    _fp8_fills_from_bf16 = False
    """Whether `_fp8_fill_group` reads the bf16 weights; else they are freed before it makes FP8 bytes."""
    _fp8_is_direct = False
    """Whether gradients go past DeepSpeed's buckets: there is one rank, and our step takes them where they are."""

    def fp8_init(self: Any, context: Fp8Context) -> None:
        """Replace the bf16 flat groups by FP8 and bf16 compact buffers. Collective (first quantisation)."""
        self._fp8 = context
        names = {id(p): name for name, p in context.trainable.items()}
        self._fp8_quantizer = self._fp8_make_quantizer(context, self.bit16_groups_flat[0].device)
        self._fp8_in_step = False
        self._fp8_overwritten: dict[int, Written] = {}  # by id of payload
        owned = OwnedGroups(self.bit16_groups_flat)
        owned.owner = weakref.ref(self)
        self.bit16_groups_flat = owned
        self._fp8_kinds: list[CompactBuffer] = []
        self._hp_kinds: list[CompactBuffer] = []
        self._fp8_bf16_kinds: list[CompactBuffer] = []
        first = 0
        for i in range(len(self.bit16_groups)):
            first += self._fp8_init_group(i, names, first)
        for name, p in context.frozen.items():
            _freeze(name, p, context.granularity, context.stored.get(id(p)))
        self._fp8_restore_stored()
        self._fp8_set_shards()
        self._fp8_refresh(is_step=False)
        self._fp8_is_direct = self._fp8_takes_gradients and self._fp8_has_one_rank()
        if self._fp8_is_direct:
            self.overlap_comm = False  # no stream of a reduction to wait for

    @property
    def _fp8_takes_gradients(self) -> bool:
        """Whether the step is our own, which takes gradients wherever they are."""
        return isinstance(self, OnePassStage12) and self._fp8_is_adam

    def _fp8_has_one_rank(self: Any) -> bool:
        """Whether a reduced gradient is the gradient itself: no rank to sum with, no other dtype on the way."""
        return (
            all(dist.get_world_size(group) == 1 for group in self.real_dp_process_group)
            and not self.use_grad_accum_attribute
            and self.gradient_accumulation_dtype == self.dtype
            and self.gradient_predivide_factor == 1.0
        )

    def setup_buckets(self: Any) -> None:
        """Set up buckets, except with one rank, where this and the next three do nothing: DeepSpeed then finds in
        `p.grad` what buckets would bring back there, and treats it as with any number of ranks."""
        if not self._fp8_is_direct:
            super().setup_buckets()  # type: ignore[misc]

    def reduce_ready_partitions_and_remove_grads(self: Any, param: Any, i: int) -> None:
        if not self._fp8_is_direct:
            super().reduce_ready_partitions_and_remove_grads(param, i)  # type: ignore[misc]

    def reduce_ipg_grads(self: Any, comm_dtype: Any = None) -> None:
        if not self._fp8_is_direct:
            super().reduce_ipg_grads(comm_dtype=comm_dtype)  # type: ignore[misc]

    def reduce_gradients(self: Any, pipeline_parallel: bool = False) -> None:
        if self._fp8_is_direct:
            self.overlapping_partition_gradients_reduce_epilogue()
        else:
            super().reduce_gradients(pipeline_parallel=pipeline_parallel)  # type: ignore[misc]

    def _fp8_make_quantizer(self: Any, context: Fp8Context, device: torch.device) -> Any:
        """Make the holder of the scale vectors. Overridden for split masters."""
        weights, granularity = self._fp8_flat_order(context), context.granularity
        common = device, context.history, context.counter, context.first_scales(weights)
        return WeightQuantizer(self.dp_process_group, [p.shape for p in weights], granularity, *common)

    def _fp8_flat_order(self: Any, context: Fp8Context) -> list[Any]:
        """Return the FP8 weights in the order of the scale vectors: groups, then flat order."""
        fp8 = {id(p) for p in context.trainable.values()}
        return [p for group in self.round_robin_bit16_groups for p in group if id(p) in fp8]

    def _fp8_fill_group(self: Any, i: int, flat: Tensor | None, fp8: CompactBuffer, hp: CompactBuffer) -> None:
        """Encode the masters of group `i` from its bf16 weights if masters are split; else do nothing."""

    def _fp8_init_group(self: Any, i: int, names: dict[int, str], first: int) -> int:
        """Move group `i` out of the flat buffer and drop it; return its number of FP8 weights.

        The order keeps the peak low: bf16 parameters move, the flat buffer goes, and only then come FP8 bytes. With
        split masters it stays until these are encoded.
        """
        flat: Tensor = self.bit16_groups_flat[i]
        params, dtype, device = self.round_robin_bit16_groups[i], flat.dtype, flat.device
        is_fp8 = [id(p) in names for p in params]
        hp = self._fp8_make_kind(i, [not here for here in is_fp8], dtype, device)
        for index, p in enumerate(hp.params):
            hp.view(index).copy_(p.data)
            p.data = hp.view(index)
        for p in self.bit16_groups[i]:
            if getattr(p, "_hp_mapping", None) is not None:
                p._hp_mapping.lp_fragment = None
        weights = [p for p, here in zip(params, is_fp8, strict=True) if here]
        for slot, p in enumerate(weights, first):
            scale, scale_inv = self._fp8_quantizer.scale[slot], self._fp8_quantizer.scale_inv[slot]
            retype(p, Fp8Payload(names[id(p)], scale, scale_inv, dtype, device))
        self.bit16_groups_flat[i] = torch.empty(flat.numel(), dtype=dtype, device="meta")
        self.parallel_partitioned_bit16_groups[i] = list(self.bit16_groups_flat[i].split(int(self.partition_size[i])))
        bf16 = flat if self._fp8_fills_from_bf16 else None
        del flat
        fp8 = self._fp8_make_kind(i, is_fp8, E4M3.torch_dtype, device)
        self._fp8_fill_group(i, bf16, fp8, hp)
        for index, p in enumerate(weights):
            p._fp8.data = fp8.view(index)
            p._fp8.write = partial(write_through, weakref.ref(self), i, index, first + index)
        self._fp8_kinds.append(fp8)
        self._hp_kinds.append(hp)
        return len(weights)

    @torch.no_grad()
    def _fp8_restore_stored(self: Any) -> None:
        """Make masters of weights that came in FP8 their codes times scales, which bf16 has rounded on the way."""
        for i, kinds in enumerate(zip(self._fp8_kinds, self._hp_kinds, strict=True)):
            master = self.single_partition_of_fp32_groups[i].detach()
            for p, f in ((kind.params[f.index], f) for kind in kinds for f in kind.own):
                stored = self._fp8.stored.get(id(p))
                if stored is not None:
                    stored.restore_(f.in_partition.narrow(master), f.in_tensor.start)

    def _fp8_make_kind(
        self: Any, i: int, chosen: Sequence[bool], dtype: torch.dtype, device: torch.device
    ) -> CompactBuffer:
        """Make an empty buffer for the `chosen` parameters of group `i`, which is in flat order."""
        places = zip(self.round_robin_bit16_groups[i], _flat_offsets(self, i), chosen, strict=True)
        found = [(p, start) for p, start, is_chosen in places if is_chosen]
        size, group = int(self.partition_size[i]), self.real_dp_process_group[i]
        return CompactBuffer([p for p, _ in found], [start for _, start in found], size, group, dtype, device)

    def _fp8_set_shards(self: Any) -> None:
        """Tell the quantiser which master elements this rank quantises into which bytes."""
        parts: list[Part | None] = []
        for i, kind in enumerate(self._fp8_kinds):
            master = self.single_partition_of_fp32_groups[i].detach()
            for index in range(len(kind.params)):
                fragment = kind.own_of.get(index)
                if fragment is None:
                    parts.append(None)
                    continue
                source, shard = fragment.in_partition.narrow(master), fragment.in_buffer.narrow(kind.buffer)
                parts.append(Part(source, shard, fragment.in_tensor.start))
        self._fp8_quantizer.set_parts(parts)

    @torch.no_grad()
    def _fp8_refresh(self: Any, is_step: bool) -> None:
        """Update the weights on all ranks from the masters: quantise, copy bf16, gather both. Collective."""
        self._fp8_quantizer.refresh(is_step)
        for i, hp in enumerate(self._hp_kinds):
            hp.copy_own(self.single_partition_of_fp32_groups[i].detach())
        self._fp8_gather_all()
        if is_step:
            self._fp8.counter.end_step()
        self._fp8_overwritten.clear()

    def _fp8_gather_all(self: Any) -> None:
        """Gather bf16 parameters, bf16 for layers in bf16, and FP8 bytes of groups with layers in FP8. Collective."""
        counter = self._fp8.counter
        for i, (fp8, hp) in enumerate(zip(self._fp8_kinds, self._hp_kinds, strict=True)):
            if not self._fp8_is_all_bf16(i):
                counter.fp8 += fp8.gather()
            counter.hp += hp.gather(_HP_FREE_BYTES)
        for i, bf16 in enumerate(self._fp8_bf16_kinds):
            self._fp8_fill_bf16(i, bf16)
            counter.hp += bf16.gather(_HP_FREE_BYTES)
        self._fp8_point_params(keep_values=False)
        for p in (p for fp8 in self._fp8_kinds for p in fp8.params):
            p._fp8.version += 1

    @torch.no_grad()
    def _fp8_point_params(self: Any, keep_values: bool) -> None:
        """Point parameters that are not in FP8 into the compact buffers, also where a user has assigned `p.data`.

        Args:
            keep_values: whether assigned values go into the buffer; else the buffer's stay, as in DeepSpeed.
        """
        strays = [(hp.view(i), hp.params[i], hp.params[i].data.clone()) for hp in self._hp_kinds for i in hp.strays()]
        for view, p, value in strays:  # all were cloned first: two may have been exchanged
            if keep_values and value.shape == view.shape:
                view.copy_(value)
            p.data = view

    @torch.no_grad()
    def fp8_set_bf16(self: Any, names: Collection[str]) -> None:
        """Keep bf16 of the masters of the weights `names`, and of no others, beside their bytes. Collective.

        Values that a user has written since the last step hold.
        """
        skipped = [i for i in range(len(self._fp8_kinds)) if self._fp8_is_all_bf16(i)]
        self._fp8_bf16_kinds, kinds = [], []  # what was there is freed first
        for p in (p for fp8 in self._fp8_kinds for p in fp8.params):
            point_at_bf16(p, None)
            p._fp8.version += 1
        for i, fp8 in enumerate(self._fp8_kinds):
            chosen = [hasattr(p, "_fp8") and p._fp8.name in names for p in self.round_robin_bit16_groups[i]]
            bf16 = self._fp8_make_kind(i, chosen, self._hp_kinds[i].buffer.dtype, fp8.buffer.device)
            self._fp8_fill_bf16(i, bf16)
            for f in bf16.own:
                written = self._fp8_overwritten.get(id(bf16.params[f.index]._fp8))
                if written is not None:
                    f.in_buffer.narrow(bf16.buffer).copy_(written.values)
            bf16.gather(_HP_FREE_BYTES)
            for index, p in enumerate(bf16.params):
                point_at_bf16(p, bf16.view(index))
            kinds.append(bf16)
        self._fp8_bf16_kinds = kinds
        for i in skipped:
            if not self._fp8_is_all_bf16(i):
                self._fp8_kinds[i].gather()

    def _fp8_is_all_bf16(self: Any, i: int) -> bool:
        """Whether no layer of group `i` reads FP8 bytes."""
        num = len(self._fp8_bf16_kinds[i].params) if self._fp8_bf16_kinds else 0
        return 0 < num == len(self._fp8_kinds[i].params)

    def _fp8_fill_bf16(self: Any, i: int, bf16: CompactBuffer) -> None:
        bf16.copy_own(self.single_partition_of_fp32_groups[i].detach())

    def step(self: Any, closure: Any = None) -> None:
        """Run DeepSpeed's step with our gather. A skipped step leaves weights, scales and histories untouched.

        Raises:
            UnsupportedError: the gather is DeepSpeed's own again. Nothing has changed.
        """
        _expect_patched_gather()
        self._fp8_in_step = True
        try:
            super().step(closure)  # type: ignore[misc]
        finally:
            self._fp8_in_step = False
        if self.overflow and self._fp8.history is not None:
            self._fp8.history.amax_local.zero_()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        """Load as DeepSpeed does, then quantise; a universal load ends with our gather. Raises as `step` does."""
        if kwargs.get("checkpoint_folder") is not None:
            _expect_patched_gather()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        self._fp8_refresh(is_step=False)

    def _update_model_bit16_weights(self: Any, group_index: int) -> None:
        """Do nothing: parameters point into the compact buffers since the gather (`_fp8_point_params`)."""

    def _link_all_hp_params(self: Any) -> None:
        """Link fp32 fragments as DeepSpeed does, without a bf16 copy of each weight behind `lp_fragment`."""
        weights = self._fp8.trainable.values()
        for p in weights:
            p._fp8.export = p._fp8.placeholder.expand(p.numel())
        try:
            super()._link_all_hp_params()  # type: ignore[misc]
        finally:
            for p in weights:
                p._fp8.export = None
        for group in self.bit16_groups:
            for p in group:
                if getattr(p, "_hp_mapping", None) is not None:
                    p._hp_mapping.lp_fragment = None
        self._fp8_set_shards()

    def offload_states(self: Any, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        include, with_weights, device = split_lp_params(self, include, device)
        super().offload_states(include=include, device=device, **kwargs)  # type: ignore[misc]
        if with_weights:
            offload_weights(self, device)
        self._fp8_set_shards()  # views of what has left would keep its memory

    def reload_states(self: Any, non_blocking: bool = False) -> None:
        reload_weights(self)  # first: DeepSpeed would move its flat buffer, which is a meta tensor here
        super().reload_states(non_blocking=non_blocking)  # type: ignore[misc]
        self._fp8_set_shards()

    def _fp8_move_weights(self: Any, device: torch.device) -> None:
        """Move the compact buffers and point every parameter into them again."""
        self._fp8_point_params(keep_values=True)
        for kind in (*self._fp8_kinds, *self._hp_kinds, *self._fp8_bf16_kinds):
            kind.buffer = kind.buffer.to(device)
        for fp8, hp in zip(self._fp8_kinds, self._hp_kinds, strict=True):
            for index, p in enumerate(fp8.params):
                p._fp8.data = fp8.view(index)
            for index, p in enumerate(hp.params):
                p.data = hp.view(index)
        for bf16 in self._fp8_bf16_kinds:
            for index, p in enumerate(bf16.params):
                point_at_bf16(p, bf16.view(index))

    def fp8_resident_bytes(self: Any) -> dict[str, int]:
        """Return this rank's bytes of FP8 weights and of bf16 parameters, and how many weights are FP8."""
        return {
            "fp8": sum(kind.buffer.numel() for kind in self._fp8_kinds),
            "hp": sum(kind.buffer.nbytes for kind in (*self._hp_kinds, *self._fp8_bf16_kinds)),
            "num_fp8_weights": sum(p.numel() for kind in self._fp8_kinds for p in kind.params),
        }


def _flat_offsets(optimizer: Any, i: int) -> list[int]:
    """Return the first element of each parameter of group `i` in the flat group, in flat order.

    DeepSpeed 0.19 stores these offsets (parameters may be padded to 16 bytes); before, parameters lie without gaps.
    """
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
    if offsets is not None:
        return list(offsets[i])
    starts, end = [], 0
    for p in optimizer.round_robin_bit16_groups[i]:
        starts.append(end)
        end += p.numel()
    return starts


def _freeze(name: str, p: Any, granularity: Granularity, stored: StoredScales | None) -> None:
    """Store a frozen weight in FP8. Every rank has all of it, so there is no collective and no owner.

    Args:
        stored: scales of a weight that came in FP8 and whose data are its bytes; None: it is quantised.
    """
    if stored is None:
        scale, scale_inv = granularity.scales(granularity.amax(p.data.reshape(-1), p.shape))
        payload = Fp8Payload(name, scale, scale_inv, p.dtype, p.device)
        payload.data = payload.quantize(p.data)
    else:
        scale, scale_inv, granularity = stored.scale, stored.scale_inv, stored.granularity
        payload = Fp8Payload(name, scale, scale_inv, torch.bfloat16, p.device)
        payload.data = p.data.view(E4M3.torch_dtype)

    @torch.no_grad()
    def write(value: Tensor) -> None:
        if stored is not None and torch.equal(value.to(payload.dtype), payload.dequantize()):
            return  # a checkpoint has what a reader was given, whose scales would be others
        new_scale, new_scale_inv = granularity.scales(granularity.amax(value.reshape(-1), value.shape))
        scale.copy_(new_scale)
        scale_inv.copy_(new_scale_inv)
        assert payload.data is not None
        payload.data.copy_(payload.quantize(value))

    payload.write, payload.has_master = write, False
    retype(p, payload)


def _expect_patched_gather() -> None:
    """Raise if DeepSpeed's gather is its own again: it would gather meta tensors, some backends in silence."""
    if not hasattr(stage_1_and_2.all_gather_dp_groups, "fp8_ds_original"):
        raise UnsupportedError(
            "fp8_ds.uninstall(): expected no engine in FP8 of ZeRO 1 or 2 in use after it, got a step of one, or a "
            "load. No weight was changed. Call it after engine.destroy() of the last of them."
        )


def patched_all_gather(original: Any) -> Any:
    """Wrap `all_gather_dp_groups`: an FP8 optimizer's groups go to their owner, all others to DeepSpeed's own."""

    def all_gather_dp_groups(groups_flat: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(groups_flat, OwnedGroups):
            owner = groups_flat.owner()
            assert owner is not None
            return owner._fp8_refresh(is_step=owner._fp8_in_step)
        return original(groups_flat, *args, **kwargs)

    all_gather_dp_groups.fp8_ds_original = original  # type: ignore[attr-defined]
    return all_gather_dp_groups
