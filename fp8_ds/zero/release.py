"""Gradient release: weights are updated during the backward, bucket by bucket, and their gradients freed at once.

Exact clipping needs all reduced gradients at once: `release_clipping: "exact"` with clipping holds the reduced shards
until `step` (2 bytes per parameter and rank share) and this module has nothing to do. "delayed_norm" clips by the
global norm of the step before; a first step is not clipped.

A bucket with an infinite or NaN gradient is skipped, alone: buckets before it have been updated already. Ranks of model
parallelism would skip different ones, and parameters that all of them hold would differ: this is refused.

In stages 1 and 2 the copy of reduced gradients into the partition becomes their update; in stage 3 the copy of reduced
gradient shards into their buffer.

Source: LOMO (arXiv 2306.09782).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, OPTIMIZER_TIMERS
from torch import Tensor

from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.adamw import StepInputs
from fp8_ds.optim.core import AdamCore, StepCache
from fp8_ds.zero.norm import HyperparameterCheck, clip_factor, overflow_flag
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.states3 import Fp8StatesStage3
from fp8_ds.zero.states12 import GATHER_TIMER, STEP_TIMER, Fp8StatesStage12

NO_GRADIENT = (
    "expected release false to read or write gradients after the backward, got true: they are freed once used. "
    'Set "fp8": {"optimizer": {"release": false}}, or look at them in a hook of the parameter.'
)


def refuse_model_parallel(group: Any) -> None:
    """Raise ConfigError where `group`, of tensor and model parallelism (None: without), has several ranks."""
    size = 1 if group is None else dist.get_world_size(group)
    if size > 1:
        raise ConfigError(
            f"fp8.optimizer.release: expected false with tensor or model parallelism of {size} ranks, got true. They "
            "would skip and clip a bucket each by its own gradients, and weights that all of them hold would differ. "
            'Set "release": false; with "release_clipping": "exact" and gradient_clipping, reduced shards are held and '
            "it may stay."
        )


def make_updater(optimizer: Any, groups: Sequence[Sequence[Any]]) -> ReleaseUpdater:
    """Make the updater of a ZeRO optimizer with FP8 states whose parameters are `groups`."""
    num_parameters = sum(map(len, groups))
    indices = {name: index for index, name in enumerate(optimizer._fp8_scale_names)}
    group, max_norm = optimizer.dp_process_group, optimizer.clip_grad
    return ReleaseUpdater(optimizer.optimizer.core, num_parameters, indices, group, max_norm)


class ReleaseUpdater:
    """Updater of the shards of one bucket's parameters, as soon as their gradients are reduced.

    Args:
        num_parameters: number of optimized parameters, the same on all ranks.
        scale_indices: entry in the scale vectors by name, of FP8 weights with split masters.
        max_norm: DeepSpeed's gradient_clipping, applied to the norm of the step before; 0: none.
    """

    def __init__(
        self,
        core: AdamCore,
        num_parameters: int,
        scale_indices: dict[str, int],
        group: Any,
        max_norm: float,
    ) -> None:
        self.core = core
        self.group = group
        self.max_norm = max_norm
        device = core.device
        self._num_parameters = num_parameters
        self._scale_indices = scale_indices
        self._shard_index = {shard.name: index for index, shard in enumerate(core.shards)}
        self.alike = HyperparameterCheck(core, group)
        self._inputs: StepInputs | None = None
        self._expected: set[str] = set()
        self._square_sum = torch.zeros((), dtype=torch.float32, device=device)
        self._indices: StepCache[tuple[str, ...], Tensor] = StepCache()
        self.last_norm = torch.zeros((), dtype=torch.float32, device=device)
        """Global norm of the last step without infinities and NaN."""

    def expect(self, names: Sequence[str]) -> None:
        """Record gradients of the parameters `names`; RuntimeError if one comes twice before `finish`."""
        if twice := self._expected.intersection(names):
            raise RuntimeError(
                f"fp8.optimizer.release: expected one backward per step, got a second gradient of {sorted(twice)[0]}. "
                "Call engine.step() after every backward, or turn release off."
            )
        self._expected.update(names)

    @torch.no_grad()
    def update(
        self, names: Sequence[str], grads: dict[str, Tensor], param_groups: Sequence[dict[str, Any]], loss_scale: float
    ) -> None:
        """Update the parameters `names` (the same on all ranks). Collective; no host synchronisation.

        Args:
            grads: this rank's reduced gradient shards by name, 1-D; a name may be missing where it holds no shard.
                They may be freed once the current stream is done with them.
        """
        if self._inputs is None:
            self._inputs = self.core.begin(param_groups)
        names, held = list(names), [name for name in names if name in grads]
        squares = self._squares(names, held, grads, param_groups)
        total = squares.sum()
        self._square_sum += total
        skip = (~torch.isfinite(total)).int()
        factor = clip_factor(self.last_norm, self.max_norm, loss_scale)
        chosen = [self._scale_indices[name] for name in names if name in self._scale_indices]
        indices = self._entries(("scales", *names), chosen)
        scales = self.core.scales
        if indices.numel():
            kept = torch.where(skip == 0, scales.next_scale_inv[indices], scales.previous_scale_inv[indices])
            scales.next_scale_inv[indices] = kept
        inputs = replace(self._inputs, skip=skip, grad_scale=factor)
        if held:
            self.core.run([grads[name] for name in held], inputs, [self._shard_index[name] for name in held])
        if indices.numel():
            scales.commit(indices)

    @torch.no_grad()
    def finish(self, history: AmaxHistory | None) -> Tensor:
        """End the step, start reducing amaxes, and return the gradient norm before clipping (float32, 0-dim)."""
        norm = self._square_sum.sqrt()
        self.last_norm.copy_(torch.where(torch.isfinite(norm), norm, self.last_norm))
        self._square_sum.zero_()  # in place, both: a CUDA graph of an update reads and writes them where they are
        if self._inputs is not None and self.core.sums.any_moved:  # what was skipped or has no gradient counts, too
            self.core.sums.keep(~torch.isfinite(norm) if len(self._expected) == self._num_parameters else None)
        self._expected.clear()
        self._inputs = None
        self._indices.next_step()
        scales = self.core.scales
        if history is not None and scales.extra.numel():
            scales.extra.copy_(history.amax_local)
        scales.start_reduce()
        return norm

    def restart(self) -> None:
        """Forget a backward that began before a checkpoint was loaded; weights are as they were."""
        self._square_sum.zero_()
        self._expected.clear()
        self._inputs = None

    def _squares(
        self, names: list[str], held: list[str], grads: dict[str, Tensor], param_groups: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Return float32 [len(names)]: squared gradient norms over all ranks; NaN if ranks would step differently."""
        squares = torch.zeros(len(names), dtype=torch.float32, device=self.core.device)
        if held:
            norms = torch.stack(list(torch._foreach_norm([grads[name] for name in held], 2, dtype=torch.float32)))
            if len(held) == len(names):
                squares = norms.square()
            else:
                place = {name: position for position, name in enumerate(names)}
                squares[self._entries(("held", *names), [place[name] for name in held])] = norms.square()
        if dist.get_world_size(self.group) > 1:
            squares = self.alike.sum(squares, param_groups)
        return squares

    def _entries(self, key: tuple[str, ...], values: list[int]) -> Tensor:
        """Return `values` on the device; cached, since buckets are mostly the same in every step."""
        return self._indices.get(key, lambda: torch.tensor(values, dtype=torch.long, device=self.core.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a bit-exact resume needs, in builtin types."""
        return {"last_norm": float(self.last_norm)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_norm.fill_(state["last_norm"])


class Fp8ReleaseStage12(Fp8StatesStage12):
    """Mix-in before DeepSpeedZeroOptimizer. With `overlap_comm` updates run on the stream of the reduction."""

    _fp8_takes_gradients = False

    def fp8_init(self: Any, context: Fp8Context) -> None:
        refuse_model_parallel(self.model_parallel_group)
        super().fp8_init(context)
        copies = 3 if self.overlap_comm else 2  # one or two buckets, and what the reduction flattens
        bucket_bytes = OUTSTANDING_UPDATE_BYTES // copies
        self.reduce_bucket_size = min(self.reduce_bucket_size, bucket_bytes // self.dtype.itemsize)
        context.release = self._fp8_release = make_updater(self, self.bit16_groups)
        self._fp8_alike = self._fp8_release.alike
        self._fp8_ready: dict[str, Tensor] = {}

    def _fp8_link(self: Any) -> None:
        """Make readers of gradients raise on all ranks; DeepSpeed's own raise on the owners, while the others wait."""
        super()._fp8_link()
        for group in self.bit16_groups:
            for p in group:
                p.get_full_hp_grad = functools.partial(_no_gradient, self._fp8_names[id(p)])
                p.set_full_hp_grad = p.get_full_hp_grad

    def process_gradients(self: Any, param: Any, i: int) -> None:
        """Put every gradient into a bucket at once, in stage 1 too."""
        if getattr(self, "_coalesce_grad_reduction", False):  # since DeepSpeed 0.19.8
            return
        # Stage 1 of DeepSpeed's own empties no bucket after a micro-batch that does not end the step: it would find two
        # gradients of a parameter in one, and say nothing of release.
        self._fp8_release.expect([self._fp8_names[id(param)]])
        self.setup_buckets()
        self.reduce_ready_partitions_and_remove_grads(param, i)
        for dtype, bucket in self.ipg_buckets.items():
            # One gradient that is larger than a bucket: DeepSpeed would keep it until the next one is there.
            if bucket.elements > self.reduce_bucket_size:
                self.reduce_ipg_grads(comm_dtype=dtype)

    def reduce_gradients(self: Any, pipeline_parallel: bool = False) -> None:
        """Reduce the last bucket: all gradients are in buckets already, in stage 1 too."""
        self.overlapping_partition_gradients_reduce_epilogue()

    def copy_grads_in_partition(self: Any, param: Any, group_idx: int | None = None) -> None:
        """Remember this rank's part of a reduced gradient for the update of its bucket."""
        shard = param._hp_mapping.fp8_shard
        grad = self.get_gradient_for_reduction(param).reshape(-1).narrow(0, shard.start, shard.numel)
        self._fp8_ready[shard.name] = grad

    def reduce_ipg_grads(self: Any, comm_dtype: Any = None) -> None:
        """Reduce a bucket, update its parameters on the same stream, and free its gradients."""
        buckets = self.ipg_buckets.values() if comm_dtype is None else [self.ipg_buckets[comm_dtype]]
        params = [self.bit16_groups[i][index] for bucket in buckets for i, index, _ in bucket.params]
        grads = [self.get_gradient_for_reduction(p) for p in params]
        super().reduce_ipg_grads(comm_dtype)
        if not params:
            return
        stream = self.reduction_stream if self.overlap_comm else get_accelerator().current_stream()
        with get_accelerator().stream(stream):
            if self.overlap_comm and not get_accelerator().is_synchronized_device():
                for grad in grads:  # those too large for the bucket's buffer are freed below
                    grad.record_stream(stream)
            names = [self._fp8_names[id(p)] for p in params]
            self._fp8_release.update(names, self._fp8_ready, self.optimizer.param_groups, self.loss_scale)
        self._fp8_ready = {}
        for p in params:
            self.clear_grad_attribute(p)

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Run DeepSpeed's epilogue without the flat partition of gradients that its step would read."""
        self.reduce_ipg_grads()
        for index in range(len(self.params_already_reduced)):
            self.params_already_reduced[index] = False
        if self.overlap_comm:
            if self.reduction_stream is not None:
                get_accelerator().current_stream().wait_stream(self.reduction_stream)
            self._clear_previous_reduced_grads()
        self._release_ipg_buffers()
        self._clear_param_grad_only()
        self._epilogue_ran_this_backward = True

    def step(self: Any, closure: Any = None) -> None:
        """Gather the weights, which are updated already. `overflow`: some bucket was skipped."""
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        self.timers(STEP_TIMER).start()
        norm = self._fp8_release.finish(self._fp8.history)
        self.fp8_flag.send(overflow_flag(norm))
        self._fp8_end_step(norm)
        self.timers(STEP_TIMER).stop()
        self.timers(GATHER_TIMER).start()
        self._fp8_refresh(is_step=True)
        self.timers(GATHER_TIMER).stop()
        self.timers.log(OPTIMIZER_TIMERS)


def _no_gradient(name: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(f"gradient of {name}: {NO_GRADIENT}")


class Fp8ReleaseStage3(Fp8StatesStage3):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3. Updates run on the stream of the reduction."""

    _fp8_keeps_gradients = False

    def fp8_init(self: Any, context: Fp8Context) -> None:
        refuse_model_parallel(self.model_parallel_group)
        super().fp8_init(context)
        context.release = self._fp8_release = make_updater(self, self.fp16_groups)
        self._fp8_alike = self._fp8_release.alike

    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Update the parameters of a bucket from their reduced shards, and free their gradients."""
        grads = {}
        for p, partition in zip(params_to_release, grad_partitions, strict=True):
            shard = self._fp8_shard_of.get(id(p))
            if shard is not None:
                grads[shard.name] = partition.reshape(-1)[: shard.numel]
        names = [self.param_names[p] for p in params_to_release]
        self._fp8_release.expect(names)
        self._fp8_release.update(names, grads, self.optimizer.param_groups, self.loss_scale)
        for p in params_to_release:
            if p.grad is not None and not get_accelerator().is_synchronized_device():
                p.grad.record_stream(get_accelerator().current_stream())
            p.grad = None
        return []

    def _get_fp32_grad_state_partition(self: Any, param: Any, release_swap_buffers: bool) -> Any:
        raise UnsupportedError(f"gradient of {self.param_names[param]}: {NO_GRADIENT}")

    def offload_states(self: Any, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        """Offload states as without release, except gradients, which have no buffer."""
        wanted = set(OffloadStateTypeEnum) if include is None else set(include)
        super().offload_states(include=wanted - {OffloadStateTypeEnum.lp_grads}, device=device, **kwargs)

    def step(self: Any, closure: Any = None) -> None:
        """End a step whose updates are done. `overflow`: some bucket was skipped."""
        self._pre_step()
        self._partition_all_parameters()
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().wait_stream(self.reduce_and_partition_stream)
        timer_names = {STEP_TIMER}
        self.timers(STEP_TIMER).start()
        norm = self._fp8_release.finish(self._fp8.history)
        self.zero_grad(set_to_none=True)
        self.fp8_flag.send(overflow_flag(norm))
        self._fp8_end_step(norm)
        for i in range(len(self.fp16_groups)):
            self.averaged_gradients[i] = None
        self.timers(STEP_TIMER).stop()
        self._post_step(timer_names)
