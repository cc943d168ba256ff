"""ZeRO-1 and 2 with FP8 optimizer states: DeepSpeed's step, its flat fp32 gradients and its dense states are replaced.

DeepSpeed's flat fp32 masters become tensors of no size (`virtual_flat`): the high part of each lies in the gather
buffer, the low part beside the moments. Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, OPTIMIZER_TIMERS
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.masters import BF16_8
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.core import AdamCore
from fp8_ds.optim.states import (
    MOMENTS,
    FlatBuffer,
    allocate_lo,
    read_dense,
    weight_id,
    write_dense,
    write_first_codes,
)
from fp8_ds.optim.user_writes import overwrite, write_low
from fp8_ds.zero.compact_buffer import CompactBuffer
from fp8_ds.zero.norm import clip_factor, global_norm, overflow_flag
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from fp8_ds.zero.states import Fp8States
from fp8_ds.zero.weights import virtual_flat

STEP_TIMER, GATHER_TIMER = OPTIMIZER_TIMERS[2], OPTIMIZER_TIMERS[0]


class Fp8StatesStage12(Fp8States, Fp8ZeroStage12):
    """Mix-in before DeepSpeedZeroOptimizer whose inner optimizer is a `ZeroAdamW`."""

    _fp8_fills_from_bf16 = True
    _fp8_takes_gradients = True

    @property
    def _fp8_waits(self: Any) -> bool:
        return bool(self.check_grad_overflow)

    @property
    def _fp8_deepspeed_masters(self: Any) -> Any:
        return self.single_partition_of_fp32_groups

    def fp8_init(self: Any, context: Fp8Context) -> None:
        """Encode masters from the bf16 weights, group by group. Collective."""
        if "_fp8_device" in self.__dict__:
            self.device = self.__dict__.pop("_fp8_device")
        self._fp8_names = {id(p): name for p, name in self.param_names.items()}
        self._fp8_flats: list[FlatBuffer] = []
        super().fp8_init(context)
        self._fp8_manage()
        self._fp8_link()
        self._fp8_check_stored()

    def _fp8_make_quantizer(self: Any, context: Fp8Context, device: torch.device) -> Any:
        weights = self._fp8_flat_order(context)
        names, first = [self._fp8_names[id(p)] for p in weights], context.first_scales(weights)
        return self._fp8_make_scales(names, [p.data for p in weights], device, first)

    def _fp8_set_shards(self: Any) -> None:
        """Point every shard at where its bytes lie (again, after an offload or reload has moved them)."""
        if not self.optimizer.has_core:
            return
        for flat, fp8, hp in zip(self._fp8_flats, self._fp8_kinds, self._hp_kinds, strict=True):
            for before, (_, now) in zip(flat.shards, self._fp8_pieces(flat.row, fp8, hp, 0), strict=True):
                before.hi = now.hi
        self.optimizer.core.moved()

    def _fp8_fill_group(self: Any, i: int, flat: Tensor | None, fp8: CompactBuffer, hp: CompactBuffer) -> None:
        """Encode this rank's fragments of group `i` from `flat` (bf16), and all bytes of its FP8 weights."""
        assert flat is not None
        first = sum(len(kind.params) for kind in self._fp8_kinds)
        scales, seed = self._fp8_quantizer.scales, self.optimizer.seed
        for index, (p, place) in enumerate(zip(fp8.params, fp8.layout.in_flat, strict=True)):
            source, codes = place.narrow(flat), fp8.view(index).view(torch.uint8).view(-1)
            own_seed = None if id(p) in self._fp8.stored else seed
            number = weight_id(self._fp8_names[id(p)])
            write_first_codes(codes, source, self._fp8_format, scales, first + index, own_seed, number)
        size = int(self.partition_size[i])
        own = FlatBuffer(i, size, self._fp8_pieces(i, fp8, hp, first))
        partition = flat.narrow(0, dist.get_rank(self.real_dp_process_group[i]) * size, size)
        for shard, values in own.split(partition):
            allocate_lo(shard, shard.hi.device)
            if shard.fmt.is_fp8:
                p = fp8.params[shard.scale_index - first]
                self._fp8_write_first(p, shard, values)
        self._fp8_flats.append(own)
        virtual = virtual_flat(size, flat.device)
        self.single_partition_of_fp32_groups[i] = virtual
        self.optimizer.param_groups[i]["params"] = [virtual]

    def _fp8_pieces(
        self: Any, i: int, fp8: CompactBuffer, hp: CompactBuffer, first: int
    ) -> list[tuple[ShardRange, AdamShard]]:
        """Return the shards of group `i` without low parts and moments, in the order of the partition."""
        pieces = []
        for kind in (fp8, hp):
            fmt = self._fp8_format if kind is fp8 else BF16_8
            buffer = kind.buffer.view(torch.uint8) if kind is fp8 else kind.buffer
            for f in kind.own:
                name = self._fp8_names[id(kind.params[f.index])]
                hi, scale_index = f.in_buffer.narrow(buffer), first + f.index if kind is fp8 else 0
                start = f.in_tensor.start
                shard = AdamShard(name, hi.numel(), start, weight_id(name), i, scale_index, fmt, hi)
                pieces.append((f.in_partition, shard))
        return sorted(pieces, key=lambda piece: piece[0].start)

    def _fp8_manage(self: Any) -> None:
        scales = self._fp8_quantizer.scales
        rows, device = range(len(self._fp8_flats)), self._fp8_kinds[0].buffer.device
        core = AdamCore(self._fp8_flats, rows, scales, device, self.optimizer.decoupled, self.optimizer.seed)
        groups = self.round_robin_bit16_groups
        core.set_weight_rows([i for i, group in enumerate(groups) for p in group if hasattr(p, "_fp8")])
        self.optimizer.manage(core)

    def step(self: Any, closure: Any = None) -> None:
        """Update all fragments straight from the reduced gradients; then gather FP8 and bf16.

        `overflow` (a gradient was infinite or NaN, nothing has changed) is true at once with
        `bf16.check_grad_overflow`, DeepSpeed's default; without it, the host does not wait for the device and learns of
        it one step late.
        """
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        self._fp8_point_params(keep_values=True)  # what a user assigns is the master, as what he writes in place
        grads, params = self._fp8_gradients()
        self.timers(STEP_TIMER).start()
        norm = global_norm(self, grads, params)
        skip = overflow_flag(norm)
        self.fp8_flag.send(skip)
        self._fp8_update(grads, clip_factor(norm, self.clip_grad, self.loss_scale), skip)
        self._fp8_end_step(norm)
        for i, params in enumerate(self.params_in_partition):
            _drop_gradients(params)
            self.averaged_gradients[i] = self.all_grad_tensors[i] = None
        self.timers(STEP_TIMER).stop()
        self.timers(GATHER_TIMER).start()
        if not self._fp8_is_skipped():
            self._fp8_refresh(is_step=True)
        self.timers(GATHER_TIMER).stop()
        self.timers.log(OPTIMIZER_TIMERS)

    def _fp8_gradients(self: Any) -> tuple[list[Tensor], list[Any]]:
        """Return this rank's reduced gradients, 1-D, one per shard, and their parameters."""
        by_name: dict[str, tuple[Tensor, Any]] = {}
        for i, params in enumerate(self.params_in_partition):
            _drop_gradients(self.params_not_in_partition[i])
            pieces = [g for g in self.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            for p, grad in zip(params, pieces, strict=False):  # DeepSpeed may put a piece of padding last
                by_name[self._fp8_names[id(p)]] = (grad.reshape(-1), p)
        found = [by_name[shard.name] for shard in self.optimizer.core.shards]
        for (grad, _), shard in zip(found, self.optimizer.core.shards, strict=True):
            assert grad.numel() == shard.numel, (shard.name, grad.numel(), shard.numel)
        return [grad for grad, _ in found], [p for _, p in found]

    @torch.no_grad()
    def _fp8_refresh(self: Any, is_step: bool) -> None:
        """Gather FP8 bytes and bf16. Collective. It does nothing inside `fp8_dense`, which ends with a gather."""
        if self._fp8_is_dense:
            return
        self._fp8_gather_all()
        if is_step:
            self._fp8_end_scales()
            self._fp8.counter.end_step()
            self._fp8_overwritten.clear()

    def _fp8_fill_bf16(self: Any, i: int, bf16: CompactBuffer) -> None:
        own = {self._fp8_names[id(bf16.params[f.index])]: f for f in bf16.own}
        for shard in self._fp8_flats[i].shards:
            f = own.get(shard.name)
            if f is not None:
                read_dense(shard, None, f.in_buffer.narrow(bf16.buffer), self._fp8_quantizer.scale_inv)

    def _fp8_enter_dense(self: Any) -> None:
        self._link_all_hp_params()

    def _fp8_absorb(self: Any, saved_scales: dict[str, Tensor]) -> None:
        super()._fp8_absorb(saved_scales)
        self._fp8_link()
        self._fp8_refresh(is_step=False)
        self._fp8_overwritten.clear()

    def _get_groups_without_padding(self: Any, groups: Any) -> Any:
        """Return the masters as DeepSpeed saves them, dense float32 on the CPU, without padding."""
        return super()._get_groups_without_padding(self._fp8_dense_masters())  # type: ignore[misc]

    def _restore_from_bit16_weights(self: Any) -> None:
        with self.fp8_dense():
            super()._restore_from_bit16_weights()

    def _fp8_read_master(self: Any, i: int, index: int, full: Tensor) -> None:
        if self._fp8_is_dense:
            super()._fp8_read_master(i, index, full)
            return
        for shard in self._fp8_shards_of(i, index):
            out = full.narrow(0, shard.start, shard.numel)
            read_dense(shard, None, out, self._fp8_quantizer.scale_inv)

    def _link_all_hp_params(self: Any) -> None:
        super()._link_all_hp_params()
        if not self._fp8_is_dense:
            self._fp8_link()

    def _fp8_link(self: Any) -> None:
        """Make fragments of this rank's parameters read and write quantised states."""
        if not self.optimizer.has_core:
            return
        pieces = {piece[1].name: piece for flat in self._fp8_flats for piece in flat.pieces}
        for i, group in enumerate(self.bit16_groups):
            for p in group:
                self._fp8_link_fragment(i, p, pieces.get(self._fp8_names[id(p)]))
                p.set_full_hp_param = functools.partial(self._fp8_set_full, p)
        self._hp_optimizer_states_linked = True  # nothing is left for DeepSpeed to link in its first step

    def _fp8_link_fragment(self: Any, i: int, p: Any, piece: tuple[ShardRange, AdamShard] | None) -> None:
        """Link a fragment if this rank has a shard. DeepSpeed is wrong about that with `round_robin_gradients`."""
        if piece is None:
            p._hp_mapping = None
            return
        elements, shard = piece
        of_bf16 = fragment_address(numel=shard.numel, start=shard.start)
        if p._hp_mapping is None or p._hp_mapping.lp_fragment_address != of_bf16:
            of_flat = fragment_address(numel=shard.numel, start=elements.start)
            gradients = self.averaged_gradients, self.offload_gradient_dict
            p._hp_mapping = tensor_fragment(None, of_bf16, None, of_flat, *gradients, False, i)
        if self.round_robin_gradients:
            p._index_in_param_group = next(k for k, q in enumerate(self.params_in_partition[i]) if q is p)
        mapping = p._hp_mapping
        mapping.__class__ = StateFragment
        mapping.fp8_owner, mapping.fp8_shard = self, shard
        mapping.hp_fragment = mapping.optim_fragment = None

    @torch.no_grad()
    def _fp8_set_full(self: Any, p: Any, value: Tensor, optim_state_key: str | None = None) -> None:
        """Set a master or moment to `value`, whole on every rank, for `safe_set_full_fp32_param` and its like."""
        core = self.optimizer.core
        flat = value.detach().reshape(-1)
        if optim_state_key is None:
            if hasattr(p, "_fp8"):
                with self.fp8_load():
                    p.copy_(value)  # all bytes on every rank, and this rank's low part
                return
            p.data.copy_(value)
        if p._hp_mapping is None:
            return
        shard = p._hp_mapping.fp8_shard
        if optim_state_key is not None:
            if optim_state_key not in MOMENTS:
                raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
            core.allocate()
        write_dense(shard, optim_state_key, flat.narrow(0, shard.start, shard.numel), core.scales.scale_inv)

    def _fp8_write(self: Any, group_index: int, index: int, slot: int, flat: Tensor) -> None:
        """Make what a user writes into a weight its master, except elements that equal what was read."""
        if self._fp8_is_dense or self._fp8_loading:
            super()._fp8_write(group_index, index, slot, flat)
            return
        payload, scales = self._fp8_kinds[group_index].params[index]._fp8, self._fp8_quantizer.scales
        hp = None if payload.hp is None else payload.hp.view(-1)
        kept = overwrite(payload.data.view(torch.uint8).view(-1), flat, scales, slot, self._fp8_format, hp)
        if hp is not None:
            hp.copy_(flat)
        for shard in self._fp8_shards_of(group_index, index):
            part = slice(shard.start, shard.start + shard.numel)
            write_low(shard, flat[part], kept[part], scales.scale_inv)

    def _fp8_take_over(self: Any, group_index: int, index: int, flat: Tensor) -> None:
        if self._fp8_is_dense:
            super()._fp8_take_over(group_index, index, flat)
            return
        for shard in self._fp8_shards_of(group_index, index):
            write_dense(shard, None, flat.narrow(0, shard.start, shard.numel), self._fp8_quantizer.scale_inv)

    def _fp8_take_over_bf16(self: Any) -> None:
        """Do nothing: bf16 parameters are the high parts of their masters, whoever writes them."""

    def _fp8_shards_of(self: Any, group_index: int, index: int) -> list[AdamShard]:
        """Return this rank's shards of FP8 weight `index` of a group: at most one."""
        name = self._fp8_names[id(self._fp8_kinds[group_index].params[index])]
        return [shard for shard in self._fp8_flats[group_index].shards if shard.name == name]


def _drop_gradients(params: list[Any]) -> None:
    for p in params:
        p.grad = p.grad_accum = None


class StateFragment(tensor_fragment):
    """Fragment whose master and moments are de-quantised when they are read."""

    fp8_owner: Any
    fp8_shard: AdamShard

    def get_hp_fragment(self, optim_state_key: str | None = None) -> Tensor:
        core, shard = self.fp8_owner.optimizer.core, self.fp8_shard
        if optim_state_key is not None and (optim_state_key not in MOMENTS or not core.has_moments):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
        out = torch.empty(shard.numel, dtype=torch.float32, device=core.device)
        read_dense(shard, optim_state_key, out, core.scales.scale_inv)
        return out

    def get_optim_state_keys(self) -> list[str]:
        return list(MOMENTS)
