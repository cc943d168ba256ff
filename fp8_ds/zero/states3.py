"""ZeRO-3 with FP8 optimizer states: DeepSpeed's step, its flat fp32 gradients and its dense states are replaced.

The FP8 shard of a weight is the high part of this rank's masters, the low part lies beside the moments, and DeepSpeed's
flat fp32 masters become tensors of no size (`virtual_flat`). Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.masters import BF16_8
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.states import MOMENTS, FlatBuffer, allocate_lo, read_dense, weight_id, write_dense
from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight, newer, num_real, start_of
from fp8_ds.zero.split_states import SplitStates
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.weights import SplitQuantizer, reduced_amaxes

_STEP_TIMER = "optimizer_step"


class SplitWeight(ShardedWeight):
    """An FP8 weight whose shard is the high part of its masters."""

    def __init__(self, name: str, param: Any, index: int, quantizer: Any) -> None:
        super().__init__(name, param, index, quantizer)
        self.quantizer = quantizer
        self.state: AdamShard | None = None

    @property
    def source(self) -> Tensor:
        """Decoded masters, float32 [num_real], in a new tensor; the bf16 shard of a frozen weight."""
        if self.state is None:
            return self.param.ds_tensor.data[: self.num_real]
        out = torch.empty(self.state.numel, dtype=torch.float32, device=self.state.hi.device)
        self.read_source(out)
        return out

    @source.setter
    def source(self, value: Tensor) -> None:
        """Do nothing: there is one place where masters lie."""

    def read_source(self, out: Tensor) -> None:
        if self.state is None:
            super().read_source(out)
        else:
            read_dense(self.state, None, out, self.quantizer.scale_inv)


class SplitShards(Fp8Shards):
    """FP8 weights of ZeRO-3 whose shards are the high parts of masters."""

    owner: Any

    def absorb(self, weights: list[ShardedWeight]) -> None:
        """Make what a user wrote the master (DeepSpeed keeps it only until the next step). Collective.

        Elements that were not changed keep their full precision.
        """
        trainable = [weight for weight in weights if weight.is_trainable]
        values = [newer(w.source, w.param.ds_tensor.data[: w.num_real]) for w in trainable]
        if trainable:
            self.owner.fp8_write_masters(trainable, values)
        frozen = [weight for weight in weights if not weight.is_trainable]
        if frozen:
            super().absorb(frozen)
        self.mark_ready()


class Fp8StatesStage3(Fp8ZeroStage3):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3 whose inner optimizer is a `ZeroAdamW`."""

    _fp8_shards_class, _fp8_weight_class = SplitShards, SplitWeight

    def fp8_init(self: Any, context: Fp8Context) -> None:
        """Encode masters from the bf16 shards. Collective."""
        self._fp8_waits = context.check_overflow
        self._fp8_shard_of: dict[int, AdamShard] = {}
        super().fp8_init(context)
        self._fp8_split.check_stored()

    @property
    def fp8_flag(self: Any) -> Any:
        return self._fp8_split.flag

    def _fp8_restore_stored(self: Any) -> None:
        """Do nothing: masters of weights that came in FP8 are encoded without noise."""

    def _fp8_make_quantizer(self: Any, context: Fp8Context, device: torch.device) -> Any:
        weights: Any = context.quantized
        values = [p.ds_tensor.data[: num_real(p)] for p in weights.values()]
        first = context.first_scales(weights.values())
        self._fp8_split = SplitStates(self, context, list(weights), values, device, first)
        return self._fp8_split.scales

    def _fp8_fill(self: Any, device: torch.device) -> None:
        self._fp8_shards.owner = self
        self._fp8_make_shards(device)
        self._fp8_manage()
        for group in self.fp16_groups:
            for p in group:
                shard = self._fp8_shard_of.get(id(p))
                if shard is None:
                    continue
                allocate_lo(shard, device)
                if shard.fmt.is_fp8:
                    self._fp8_split.write_first(p, shard, p.ds_tensor.data[: shard.numel])
        self._fp8_drop_flat()
        self._fp8_repoint()

    def _fp8_manage(self: Any) -> None:
        flats, rows = [], []
        for i, group in enumerate(self.fp16_groups):
            flat = FlatBuffer(i, int(self.fp16_partitioned_groups_flat_numel[i]), [])
            offset = 0
            for p in group:
                numel = num_real(p)
                if numel:
                    shard = self._fp8_make_state(p, i, offset, numel)
                    flat.pieces.append((ShardRange(offset, offset + numel), shard))
                offset += p.ds_tensor.ds_numel
            flats.append(flat)
            rows.append(self.sub_group_to_group_id[i])
        self._fp8_split.flats = flats
        row_of = {id(p): i for i, group in enumerate(self.fp16_groups) for p in group}
        weight_rows = [row_of.get(id(w.param)) for w in self._fp8_shards.weights if not w.is_stored]
        self._fp8_split.manage(rows, weight_rows, self._fp8_flat.device)

    def _fp8_make_state(self: Any, p: Any, row: int, offset: int, numel: int) -> AdamShard:
        name = self.param_names[p]
        fp8 = self._fp8_shards.of([p])
        fmt = self._fp8_split.format if fp8 else BF16_8
        index = fp8[0].index if fp8 else 0
        shard = AdamShard(name, numel, start_of(p), weight_id(name), row, index, fmt, self._fp8_hi(p, numel))
        self._fp8_shard_of[id(p)] = shard
        if fp8:
            fp8[0].state = shard
        return shard

    def _fp8_hi(self: Any, p: Any, numel: int) -> Tensor:
        fp8 = self._fp8_shards.of([p])
        if fp8:
            return fp8[0].shard[:numel].view(torch.uint8)
        return p.ds_tensor.data[:numel]

    def _fp8_repoint(self: Any) -> None:
        """Point every shard at where its bytes lie (again, after they were moved)."""
        for p in (p for group in self.fp16_groups for p in group):
            shard = self._fp8_shard_of.get(id(p))
            if shard is not None:
                shard.hi = self._fp8_hi(p, shard.numel)
        self.optimizer.core.moved()

    @torch.no_grad()
    def fp8_write_masters(self: Any, weights: list[ShardedWeight], values: list[Tensor]) -> None:
        """Set the masters of FP8 weights to `values` (1-D, this rank's), with scales to fit. Collective."""
        quantizer: SplitQuantizer = self._fp8_shards.quantizer
        sources = [(weight.index, value) for weight, value in zip(weights, values, strict=True)]
        amaxes = reduced_amaxes(quantizer.scales.num, sources, self.dp_process_group, quantizer.scales.amax.device)
        for weight, value in zip(weights, values, strict=True):
            quantizer.rescale(weight.index, amaxes[weight.index])
            shard = self._fp8_shard_of.get(id(weight.param))
            if shard is None:
                continue
            write_dense(shard, None, value, quantizer.scale_inv)
            if self._fp8_split.is_dense:  # the dense masters will be quantised in the end
                row, offset = self._fp8_places[id(weight.param)]
                self.fp32_partitioned_groups_flat[row].detach().narrow(0, offset, shard.numel).copy_(value)

    def _fp8_set_sources(self: Any) -> None:
        if self.optimizer.has_core:
            self._fp8_repoint()

    @torch.no_grad()
    def _fp8_refresh(self: Any, is_step: bool) -> None:
        """Make later gathers wait for the shards, which are the masters already, and update amax histories."""
        if self._fp8_split.is_dense:
            return
        self._fp8_shards.mark_ready()
        self._fp8_shards.refresh_bf16()
        if not is_step:
            frozen = [w for w in self._fp8_shards.weights if not (w.is_trainable or w.is_stored)]
            if frozen:
                self._fp8_shards.absorb(frozen)
            return
        self._fp8_split.end_scales()

    def step(self: Any, closure: Any = None) -> None:
        """Update all shards straight from the reduced gradients.

        `overflow`: a gradient was infinite or NaN, nothing has changed. The host waits for the device to know it, as in
        DeepSpeed, unless `bf16.check_grad_overflow` is false: then it learns of it one step late.

        Work for the host alone, which grows with the number of parameters, follows while the device updates.
        """
        self._pre_step()
        timer_names = {_STEP_TIMER}
        self.timers(_STEP_TIMER).start()
        grads, params = self._fp8_gradients()
        norm = self._fp8_split.update(grads, params)
        self._partition_all_parameters()
        self.zero_grad(set_to_none=True)
        self._fp8_split.end_step(norm, self._fp8_waits)
        for i in range(len(self.fp16_groups)):
            self.averaged_gradients[i] = None
        self.timers(_STEP_TIMER).stop()
        if not self._fp8_split.is_skipped():
            self._post_step(timer_names)

    def _fp8_gradients(self: Any) -> tuple[list[Tensor], list[Any]]:
        """Return this rank's reduced gradients, 1-D, one per shard, and their parameters."""
        grads, params = [], []
        for i, group in enumerate(self.fp16_groups):
            for p, grad in zip(group, self.averaged_gradients[i], strict=True):
                shard = self._fp8_shard_of.get(id(p))
                if shard is not None:
                    grads.append(grad.reshape(-1)[: shard.numel])
                    params.append(p)
        return grads, params

    @contextmanager
    def fp8_dense(self: Any) -> Iterator[dict[str, Tensor]]:
        """Make masters dense float32 on the CPU inside the block (see `SplitStates.dense`). Collective."""
        if self._fp8_split.is_dense:
            yield {}
            return
        try:
            with self._fp8_split.dense(self.fp32_partitioned_groups_flat, lambda: None) as scales:
                try:
                    yield scales
                finally:
                    self._fp8_repoint()
        finally:
            self._fp8_refresh(is_step=False)
            self._fp8_fetch_persistent_anew()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        with self.fp8_dense():
            super().load_state_dict(*args, **kwargs)

    def offload_states(self: Any, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        super().offload_states(include=self._fp8_split.offload(include, device), device=device, **kwargs)

    def reload_states(self: Any, non_blocking: bool = False) -> None:
        self._fp8_split.reload()
        super().reload_states(non_blocking=non_blocking)

    def fp8_bound_sums(self: Any) -> dict[int, float]:
        sums: dict[int, float] = self._fp8_split.bound_sums()
        return sums

    def fp8_load_bound_sums(self: Any, sums: dict[int, float]) -> None:
        self._fp8_split.load_bound_sums(sums)

    def _fp8_fetch_persistent_anew(self: Any) -> None:
        """Gather persistent parameters again from the shards: a load has them from dense masters. Collective."""
        stale = [p for p in self.persistent_parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
        for p in stale:
            p.partition()
        if stale:
            stale[0].all_gather_coalesced(stale).wait()

    def _fp8_hp_shards(self: Any, group: int) -> tuple[list[Tensor], list[Tensor]]:
        if not self._fp8_split.is_dense:
            return [], []
        return super()._fp8_hp_shards(group)

    def _rigid_state_dict(self: Any) -> dict[str, Any]:
        """Return DeepSpeed's state with dense float32 masters and moments on the CPU, under DeepSpeed's names."""
        state: dict[str, Any] = super()._rigid_state_dict()  # type: ignore[misc]
        state["fp32_flat_groups"] = list(self._fp8_split.dense_masters())
        return state

    def _restore_from_bit16_weights(self: Any) -> None:
        with self.fp8_dense():
            for i, group in enumerate(self.fp16_groups):
                bf16, masters = self._fp8_hp_shards(i)
                for piece, master in zip(bf16, masters, strict=True):
                    master.copy_(newer(master, piece.to(master.device)))
                if not self._fp8_flat_is_live:
                    continue  # users' writes are masters already
                offset = 0
                for p in group:
                    if self._fp8_shards.of([p]):
                        numel = num_real(p)
                        master = self.fp32_partitioned_groups_flat[i].detach().narrow(0, offset, numel)
                        master.copy_(newer(master, p.ds_tensor.data[:numel].to(master.device)))
                    offset += p.ds_tensor.ds_numel

    def _get_fp32_opt_state_partition(
        self: Any, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[Tensor, int]:
        """Return a de-quantised copy of this rank's part, padding included; writing into it changes nothing."""
        row, _ = self._fp8_places[id(param)]
        core, shard = self.optimizer.core, self._fp8_shard_of.get(id(param))
        if optim_state_key is not None and (optim_state_key not in MOMENTS or not core.has_moments):
            raise KeyError(optim_state_key)
        out = torch.zeros(param.ds_tensor.ds_numel, dtype=torch.float32, device=core.device)
        if shard is not None:
            read_dense(shard, optim_state_key, out[: shard.numel], core.scales.scale_inv)
        return out, row

    @torch.no_grad()
    def set_full_hp_param(self: Any, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if not param.requires_grad:
            return
        assert value.numel() == param.ds_numel, f"expected {param.ds_numel} elements, got {value.numel()}"
        fp8, shard = self._fp8_shards.of([param]), self._fp8_shard_of.get(id(param))
        if optim_state_key is None and fp8:
            quantizer = self._fp8_shards.quantizer
            quantizer.rescale(fp8[0].index, quantizer.amax_of(fp8[0].index, value.reshape(-1)))
            if fp8[0].payload.data is not None:
                param.partition()  # it was gathered by the scale before
        if shard is not None:
            piece = value.detach().reshape(-1).narrow(0, shard.start, shard.numel)
            self._fp8_write_state(shard, optim_state_key, piece)

    @torch.no_grad()
    def set_local_hp_param(self: Any, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if not param.requires_grad:
            return
        assert value.numel() == param.ds_tensor.ds_numel, (
            f"expected {param.ds_tensor.ds_numel} elements, got {value.numel()}"
        )
        shard = self._fp8_shard_of.get(id(param))
        if shard is None:
            return
        piece = value.detach().reshape(-1)[: shard.numel]
        scales = self.optimizer.core.scales
        if optim_state_key is None and shard.fmt.is_fp8:
            scales.wait()
            limit, largest = float(scales.amax[shard.scale_index]), float(piece.abs().max())
            if not largest <= limit:
                raise UnsupportedError(
                    f"safe_set_local_fp32_param: expected magnitudes up to {limit:.8g} for {shard.name}, those that "
                    f"its ranks have chosen one FP8 scale for, got {largest:.8g}. Use safe_set_full_fp32_param on all "
                    "ranks."
                )
        self._fp8_write_state(shard, optim_state_key, piece)

    def _fp8_write_state(self: Any, shard: AdamShard, key: str | None, value: Tensor) -> None:
        core = self.optimizer.core
        if key is not None:
            if key not in MOMENTS:
                raise KeyError(key)
            core.allocate()
        write_dense(shard, key, value, core.scales.scale_inv)
        self._fp8_shards.mark_ready()
