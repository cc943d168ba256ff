"""ZeRO-1 and 2 with gradient release: the copy of reduced gradients into the partition becomes their update."""

from __future__ import annotations

import functools
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, OPTIMIZER_TIMERS
from torch import Tensor

from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES
from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.context import Fp8Context
from fp8_ds.zero.norm import overflow_flag
from fp8_ds.zero.release import NO_GRADIENT, make_updater, refuse_model_parallel
from fp8_ds.zero.states12 import GATHER_TIMER, STEP_TIMER, Fp8StatesStage12


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
        # Stock stage 1 empties no bucket after a micro-batch that does not end the step: it would find two gradients of
        # a parameter in one, and say nothing of release.
        self._fp8_release.expect([self._fp8_names[id(param)]])
        self.setup_buckets()
        self.reduce_ready_partitions_and_remove_grads(param, i)
        for dtype, bucket in self.ipg_buckets.items():
            # One gradient that is larger than a bucket: stock code would keep it until the next one is there.
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
