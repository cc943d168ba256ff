"""ZeRO-3 with gradient release: the copy of reduced gradient shards into their buffer becomes their update."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_TIMERS
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.norm import overflow_flag
from fp8_ds.zero.release import NO_GRADIENT, ReleaseUpdater, refuse_model_parallel
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.states3 import Fp8StatesStage3

STEP_TIMER = OPTIMIZER_TIMERS[2]


class Fp8ReleaseStage3(Fp8StatesStage3):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3. Updates run on the stream of the reduction."""

    _fp8_keeps_gradients = False

    def fp8_init(self: Any, context: Fp8Context) -> None:
        refuse_model_parallel(self.model_parallel_group)
        super().fp8_init(context)
        split, num_parameters = self._fp8_split, sum(map(len, self.fp16_groups))
        indices = {name: index for index, name in enumerate(split.names)}
        context.release = self._fp8_release = ReleaseUpdater(
            split.core, num_parameters, indices, self.dp_process_group, self.clip_grad
        )
        split.alike = self._fp8_release.alike

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
        self._fp8_split.end_step(norm, self._fp8_waits)
        for i in range(len(self.fp16_groups)):
            self.averaged_gradients[i] = None
        self.timers(STEP_TIMER).stop()
        self._post_step(timer_names)
