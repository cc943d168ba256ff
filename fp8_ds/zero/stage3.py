"""ZeRO-3: mix-in for DeepSpeedZeroOptimizer_Stage3. FP8 shards, gathered in one byte, released after use.

The masters are the only high-precision copy: the bf16 shard of an FP8 weight is made from its master when DeepSpeed
reads it, and dropped again. Parameters that are not FP8 keep their bf16 shards. Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8_shares
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.parameter import Fp8Parameter
from fp8_ds.numerics.formats import E4M3
from fp8_ds.zero.param_hooks import ZeroParamHooks
from fp8_ds.zero.sharded import Bf16Shard, Fp8Shards, Gathered, InFlight, ShardedWeight, newer, num_real, start_of
from fp8_ds.zero.stage import Fp8Context, offload_weights, reload_weights, split_lp_params
from fp8_ds.zero.stored_weight import StoredWeight
from fp8_ds.zero.weights import Part, WeightQuantizer, aligned_starts

_ALIGNMENT = 16
"""Alignment in bytes: FP8 GEMMs read 16 at a time."""


class Fp8ZeroStage3:
    """Mix-in before DeepSpeedZeroOptimizer_Stage3 in the class of a retyped optimizer."""

    fp8_flag: Any = None
    """Whether a step was skipped, where the host may learn of it a step late."""
    _fp8_keeps_gradients = True
    _fp8_shards_class, _fp8_weight_class = Fp8Shards, ShardedWeight

    def fp8_init(self: Any, context: Fp8Context) -> None:
        """Give every converted weight an FP8 shard and hook all parameters. Collective (first quantisation)."""
        self._fp8 = context
        self._fp8_places: dict[int, tuple[int, int]] = {}  # by id: sub-group, and where its flat master has a parameter
        for i, group in enumerate(self.fp16_groups):
            starts = itertools.accumulate((p.ds_tensor.ds_numel for p in group), initial=0)
            self._fp8_places.update((id(p), (i, start)) for p, start in zip(group, starts, strict=False))
        device = self.fp32_partitioned_groups_flat[0].device
        for p in context.weights.values():
            if p.ds_status == ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                p.partition()  # type: ignore[attr-defined]
        quantizer = self._fp8_make_quantizer(context, device)
        self._fp8_shards = shards = self._fp8_shards_class(quantizer, context.counter, InFlight(self.module))
        shards.persistent = self.persistent_parameters
        index_of = {name: index for index, name in enumerate(context.quantized)}
        for name, p in context.weights.items():
            if name in index_of:
                shards.add(self._fp8_weight_class(name, p, index_of[name], quantizer))
            else:
                shards.add(StoredWeight(name, p, context.stored[id(p)]))
        self._fp8_restore_stored()
        self._fp8_fill(device)
        self._fp8_set_sources()
        self._fp8_masters = self.fp32_partitioned_groups_flat
        self._fp8_hooks = [ZeroParamHooks(p, shards) for p in self.module.parameters() if hasattr(p, "ds_id")]
        self._fp8_refresh(is_step=False)

    def _fp8_make_quantizer(self: Any, context: Fp8Context, device: torch.device) -> Any:
        """Make the holder of the scale vectors. This and the next are overridden for split masters."""
        weights, granularity = context.quantized.values(), context.granularity
        shapes = [p.ds_shape for p in weights]  # type: ignore[attr-defined]
        common = device, context.history, context.counter, context.first_scales(weights)
        return WeightQuantizer(self.dp_process_group, shapes, granularity, *common)

    @torch.no_grad()
    def _fp8_restore_stored(self: Any) -> None:
        """Make masters of weights that came in FP8 their codes times scales, which bf16 has rounded on the way."""
        for p in (p for group in self.fp16_groups for p in group if id(p) in self._fp8.stored):
            group, offset = self._fp8_places[id(p)]
            master = self.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, num_real(p))
            self._fp8.stored[id(p)].restore_(master, start_of(p))

    def _fp8_fill(self: Any, device: torch.device) -> None:
        self._fp8_drop_flat(remake=True)  # before the FP8 bytes exist: initialize holds no more than DeepSpeed's own
        self._fp8_make_shards(device)

    def _fp8_make_shards(self: Any, device: torch.device) -> None:
        """Make one FP8 buffer for all weights, with each shard at a multiple of 16 bytes."""
        weights = self._fp8_shards.weights
        sizes = [weight.param.ds_tensor.ds_numel for weight in weights]
        starts = aligned_starts(sizes, _ALIGNMENT)
        self._fp8_flat = torch.zeros(starts[-1], dtype=E4M3.dtype, device=device)
        for weight, start, size in zip(weights, starts, sizes, strict=False):
            weight.shard = self._fp8_flat.narrow(0, start, size)
            if isinstance(weight, StoredWeight):
                weight.fill()

    def _fp8_set_sources(self: Any) -> None:
        """Point every weight at its master elements (again, after an offload or reload has moved them)."""
        weights = [weight for weight in self._fp8_shards.weights if not weight.is_stored]
        for weight in weights:
            if weight.is_trainable:
                group, offset = self._fp8_places[id(weight.param)]
                master = self.fp32_partitioned_groups_flat[group].detach()
                weight.source = master.narrow(0, offset, weight.num_real)
            else:
                weight.source = weight.param.ds_tensor.data[: weight.num_real]
        parts = [Part(w.source, w.shard[: w.num_real], w.start) for w in weights]
        self._fp8_shards.quantizer.set_parts(parts)

    def _fp8_refresh(self: Any, is_step: bool) -> None:
        self._fp8_shards.refresh(is_step)
        self._fp8_shards.refresh_bf16()

    @torch.no_grad()
    def fp8_set_bf16(self: Any, names: Collection[str]) -> None:
        """Give the weights `names`, and no others, bf16 shards that DeepSpeed gathers; release gathered ones."""
        for weight in self._fp8_shards.weights:
            wanted = weight.payload.name in names
            if wanted == weight.in_bf16:
                continue
            if weight.gathered in (Gathered.UNSHARDED_FP8, Gathered.UNSHARDED_BF16):
                weight.param.partition()
            # Gathered in bf16 it is as DeepSpeed has it: no look at it is to go through our class.
            weight.param.__class__ = nn.Parameter if wanted else Fp8Parameter
            weight.set_bf16(wanted)
        self._fp8_shards.mark_ready()

    def _fp8_hp_shards(self: Any, group: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the bf16 shards of sub-group `group` that are not FP8, and their masters."""
        params = self.fp16_groups[group]
        masters = self.fp32_partitioned_groups_flat[group].detach().split([p.ds_tensor.ds_numel for p in params])
        chosen = [k for k, p in enumerate(params) if not self._fp8_shards.of([p])]
        return [params[k].ds_tensor.data for k in chosen], [masters[k] for k in chosen]

    def _fp8_drop_flat(self: Any, remake: bool = False) -> None:
        """Put a meta tensor in place of the bf16 flat buffer; parameters that are not FP8 get their own bf16 shards.

        Args:
            remake: whether to make these from the masters after the flat buffer is freed; else they are copied.
        """
        for i, group in enumerate(self.fp16_groups):
            for p in (p for p in group if not self._fp8_shards.of([p])):
                p.ds_tensor.data = p.ds_tensor.data.new_empty(0) if remake else p.ds_tensor.data.clone()
            flat = self.fp16_partitioned_groups_flat[i]
            self.fp16_partitioned_groups_flat[i] = torch.empty(flat.numel(), dtype=flat.dtype, device="meta")
        for weight in self._fp8_shards.weights:
            if not weight.keeps_bf16:
                weight.drop_bf16()
            elif weight.in_bf16:
                weight.param.ds_tensor.data = weight.param.ds_tensor.data.clone()
        # On its own device: masters are on the CPU in a load of FP8 states.
        self.lp_param_buffer = self.lp_param_buffer.new_empty(0)
        self._fp8_flat_is_live = False
        if not remake:
            return
        for i, group in enumerate(self.fp16_groups):
            master, offset = self.fp32_partitioned_groups_flat[i].detach(), 0
            for p in group:
                numel = p.ds_tensor.ds_numel
                if not self._fp8_shards.of([p]):
                    p.ds_tensor.data = master.narrow(0, offset, numel).to(p.dtype)
                offset += numel

    @contextmanager
    def _fp8_bf16_flat(self: Any) -> Iterator[None]:
        """Restore DeepSpeed's bf16 flat buffer inside the block, filled from the masters."""
        numels = [flat.numel() for flat in self.fp16_partitioned_groups_flat]
        self.lp_param_buffer = self.lp_param_buffer.new_empty(sum(numels))
        for i, flat in enumerate(self.lp_param_buffer.split(numels)):
            flat.copy_(self.fp32_partitioned_groups_flat[i].detach())
            self.fp16_partitioned_groups_flat[i] = flat
            pieces = flat.split([p.ds_tensor.ds_numel for p in self.fp16_groups[i]])
            for p, piece in zip(self.fp16_groups[i], pieces, strict=True):
                p.ds_tensor.data = piece
        self._fp8_flat_is_live = True
        try:
            yield
        finally:
            self._fp8_drop_flat()

    def _reassign_or_swap_out_partitioned_parameters(self: Any, sub_group_id: int) -> None:
        """Copy the masters of an updated sub-group to its bf16 shards, for parameters that have one."""
        if self._fp8_flat_is_live:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)  # type: ignore[misc]
            return
        bf16, masters = self._fp8_hp_shards(sub_group_id)
        if bf16:
            torch._foreach_copy_(bf16, masters)

    def _post_step(self: Any, timer_names: Any) -> None:
        """Run DeepSpeed's method with new FP8 shards.

        Raises:
            UnsupportedError: the optimizer has other masters than those of the FP8 weights; on all ranks.
        """
        if self.fp32_partitioned_groups_flat is not self._fp8_masters:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}: expected to find the masters of the start, got others, which it has "
                "made for other weights (BAdam does when it goes on to the next block): FP8 weights would not follow "
                'them. Train with LoRA, or all weights with "fp8": {"optimizer": {"states": "fp8"}}.'
            )
        self._fp8_refresh(is_step=True)
        super()._post_step(timer_names)  # type: ignore[misc]
        self._fp8.counter.end_step()

    def step(self: Any, closure: Any = None) -> None:
        super().step(closure)  # type: ignore[misc]
        if self.overflow and self._fp8.history is not None:
            self._fp8.history.amax_local.zero_()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        with self._fp8_bf16_flat():
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        self._fp8_refresh(is_step=False)

    @torch.no_grad()
    def _restore_from_bit16_weights(self: Any) -> None:
        """Set masters from bf16 shards where these are the newer; a weight that nobody wrote keeps its precision."""
        shards = self._fp8_shards
        for i in range(len(self.fp16_groups)):
            bf16, masters = self._fp8_hp_shards(i)
            for piece, master in zip(bf16, masters, strict=True):
                master.copy_(newer(master, piece))
        for weight in shards.weights:
            if weight.is_trainable and (self._fp8_flat_is_live or weight.bf16_shard is Bf16Shard.WRITTEN):
                weight.source.copy_(newer(weight.source, weight.param.ds_tensor.data[: weight.num_real]))
        if not self._fp8_flat_is_live:  # else who loads refreshes
            self._fp8_refresh(is_step=False)

    def offload_states(self: Any, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        include, with_weights, device = split_lp_params(self, include, device)
        if include:  # DeepSpeed before 0.19.8 offloads nothing without its own FusedAdam
            super().offload_states(include=include, device=device, **kwargs)  # type: ignore[misc]
        if with_weights:
            offload_weights(self, self._fp8_move_weights, device)
        self._fp8_set_sources()  # views of what has left would keep its memory

    def reload_states(self: Any, non_blocking: bool = False) -> None:
        reload_weights(self, self._fp8_move_weights)
        super().reload_states(non_blocking=non_blocking)  # type: ignore[misc]
        self._fp8_set_sources()

    def _fp8_move_weights(self: Any, device: torch.device) -> None:
        """Move FP8 and bf16 shards to `device`; views into the buffer stay views into it."""
        moved = self._fp8_flat.to(device)
        for weight in self._fp8_shards.weights:
            weight.shard = moved.narrow(0, weight.shard.storage_offset(), weight.shard.numel())
        self._fp8_flat = moved
        for p in self._fp8_shards.fetched_in_bf16(p for group in self.fp16_groups for p in group):
            p.ds_tensor.data = p.ds_tensor.data.to(device)

    @contextmanager
    def fp8_dense(self: Any) -> Iterator[dict[str, Tensor]]:
        """Do nothing: masters and moments are dense here. Subclasses with FP8 states override it."""
        yield {}

    @contextmanager
    def fp8_export(self: Any, wanted: bool, with_frozen: bool | None = None) -> Iterator[None]:
        """Give frozen weights that have none bf16 shards inside the block, unless `with_frozen` is false: DeepSpeed's
        checkpoints hold them in the place of masters. Its exports of ZeRO-3 gather bf16 of the masters by themselves.
        """
        with self._fp8_shards.bf16_shards([] if with_frozen is False else self._fp8_without_bf16()):
            yield

    @contextmanager
    def fp8_load(self: Any) -> Iterator[None]:
        """Let DeepSpeed write bf16 shards of frozen weights that have none, inside the block. Collective."""
        frozen = self._fp8_without_bf16()
        with self._fp8_shards.bf16_shards(frozen):
            yield
            if frozen:
                self._fp8_shards.absorb(frozen)

    def _fp8_without_bf16(self: Any) -> list[ShardedWeight]:
        """Return the frozen FP8 weights without a bf16 shard: those with masters, which a user has frozen in the middle
        of the run, and those that came in FP8. Equal on all ranks."""
        frozen = (weight for weight in self._fp8_shards.weights if not weight.param.requires_grad)
        return [weight for weight in frozen if weight.is_trainable or weight.is_stored]

    def fp8_resident_bytes(self: Any) -> dict[str, int]:
        """Return this rank's bytes outside a forward or backward: FP8 shards, bf16 shards, persistent weights."""
        parameters = [p for p in self.module.parameters() if hasattr(p, "ds_id")]
        bf16 = {p.ds_tensor.untyped_storage().data_ptr(): p.ds_tensor.untyped_storage().nbytes() for p in parameters}
        persistent = sum(
            p.ds_numel * (1 if self._fp8_shards.of([p]) else p.element_size())
            for p in parameters
            if p.ds_persist and p.ds_status == ZeroParamStatus.AVAILABLE
        )
        return {
            "fp8": self._fp8_flat.numel(),
            "hp": sum(bf16.values()),
            "persistent": persistent,
            "num_fp8_weights": sum(p.ds_numel for p in parameters if self._fp8_shards.of([p])),
        }


class Fp8ReduceStage3:
    """Mix-in before Fp8ZeroStage3: averages a bucket of gradients in FP8. DeepSpeed fills it and adds up results."""

    # The name under which DeepSpeed's private `__avg_scatter_grads` is looked up.
    @torch.no_grad()
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Return this rank's partition of each averaged gradient, without padding, in the accumulation dtype.

        DeepSpeed calls it on the stream of the reduction. Its pre- and post-division keep 16-bit sums in range and have
        no counterpart: the sum here is in float64 (`gradient_predivide_factor` is refused).
        """
        group = params_to_reduce[0].ds_process_group
        num_ranks = dist.get_world_size(group)
        if num_ranks == 1:
            return super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # type: ignore[misc]
                params_to_reduce, communication_data_type
            )
        grads = [p.grad.reshape(-1) for p in params_to_reduce]
        sums, num_bytes = reduce_scatter_fp8_shares(group, grads, self.gradient_accumulation_dtype, 1.0 / num_ranks)
        self._fp8.counter.reduced += num_bytes
        return sums
