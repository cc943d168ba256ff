"""The step of a ZeRO optimizer: DeepSpeed's own, one pass over fp32 states, FP8 states, or the end of gradient release.

`ZeroStep` is what all stages share, `Step12` and `Step3` know where DeepSpeed's stages keep gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, OPTIMIZER_TIMERS
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.flat_weights import FlatWeights
from fp8_ds.zero.norm import overflow_flag
from fp8_ds.zero.one_pass import OnePassAdam, Work, pieces_of_master
from fp8_ds.zero.release import ReleaseUpdater
from fp8_ds.zero.split_states import SplitStates
from fp8_ds.zero.stage import Fp8Context, Host3, Host12, ZeroHost

GATHER_TIMER, _, STEP_TIMER = OPTIMIZER_TIMERS


class ZeroStep:
    """One step updates this rank's masters straight from the reduced gradients; the weights follow.

    `host.overflow`: a gradient was infinite or NaN, nothing has changed. The host waits for the device to know it, as
    in DeepSpeed; with FP8 states and `bf16.check_grad_overflow` false it learns of it one step late. With fp32 states
    of ZeRO-1 and 2 and that key false it is never true, and elements with such a gradient become NaN, as in DeepSpeed.
    With gradient release: some bucket was skipped.

    Args:
        states: FP8 states, or None.
        release: updates weights during the backward; None without gradient release.

    Attributes:
        adam: our step of fp32 states; None: it is DeepSpeed's.
    """

    def __init__(
        self, host: ZeroHost, context: Fp8Context, states: SplitStates | None, release: ReleaseUpdater | None
    ) -> None:
        self._host = host
        self.context = context
        self.states = states
        self.release = release
        self.adam = OnePassAdam(host) if states is None and context.config.has_fix("adam_step") else None

    def choose(self, masters: list[Tensor]) -> Callable[[], bool] | None:
        """Return what updates `masters`, DeepSpeed's flat ones; None where it is DeepSpeed's step.

        It updates the host's numbers, too, and returns whether weights may differ.
        """
        if self.states is not None:
            return self.update_split if self.release is None else self.update_released
        if self.adam is None or self.adam.is_left_to_deepspeed(masters):
            return None
        return self.update_dense

    def update_dense(self) -> bool:
        raise NotImplementedError

    def update_split(self) -> bool:
        raise NotImplementedError

    def update_released(self) -> bool:
        """End a step whose updates are done."""
        assert self.states is not None and self.release is not None
        norm = self.release.finish(self.context.history)
        self.drop_released()
        self.states.flag.send(overflow_flag(norm))
        self.states.end_step(norm, self.waits)
        return True

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device to know of an overflow."""
        return self.context.check_overflow

    def gradients(self, states: SplitStates) -> tuple[list[Tensor], list[Any]]:
        """Return this rank's reduced gradients, 1-D, one per shard of `states`, and their parameters."""
        raise NotImplementedError

    def drop_released(self) -> None:
        """Drop what gradient release has left of the gradients: nothing."""

    def forget_skipped(self) -> None:
        """Leave amax histories as they were, if the step was skipped."""
        if self._host.overflow and self.context.history is not None:
            self.context.history.amax_local.zero_()


class Step12(ZeroStep):
    """Step of ZeRO-1 and 2, which ends with a gather.

    Args:
        weights: the optimizer's.
        refresh: quantises and gathers.

    Attributes:
        in_deepspeed: whether DeepSpeed's own step runs.
    """

    _host: Host12

    def __init__(
        self,
        host: Host12,
        context: Fp8Context,
        states: SplitStates | None,
        release: ReleaseUpdater | None,
        weights: FlatWeights,
        refresh: Callable[[bool], None],
    ) -> None:
        super().__init__(host, context, states, release)
        self._weights = weights
        self.refresh = refresh
        self.in_deepspeed = False

    def run(self, original: Callable[[Any], None], closure: Any) -> None:
        """Step. `original`: DeepSpeed's step.

        Raises:
            UnsupportedError: the gather is DeepSpeed's own again. Nothing has changed.
        """
        if self.states is None:
            expect_patched_gather()
        host, update = self._host, self.choose(self._host.single_partition_of_fp32_groups)
        if update is None:
            self._run_deepspeed(original, closure)
            return
        host.micro_step_id = INITIAL_MICRO_STEP_ID
        host.timers(STEP_TIMER).start()
        try:
            is_new = update()
        finally:  # a step that raises, as where ranks differ, can be taken again
            host.timers(STEP_TIMER).stop()
        host.timers(GATHER_TIMER).start()
        if is_new:
            self.refresh(True)
        host.timers(GATHER_TIMER).stop()
        host.timers.log(OPTIMIZER_TIMERS)

    def _run_deepspeed(self, original: Callable[[Any], None], closure: Any) -> None:
        """Run DeepSpeed's step with our gather. A skipped step leaves weights, scales and histories untouched."""
        self.in_deepspeed = True
        try:
            original(closure)
        finally:
            self.in_deepspeed = False
        self.forget_skipped()

    def update_dense(self) -> bool:
        host, masters = self._host, self._host.single_partition_of_fp32_groups
        assert self.adam is not None
        self._drop_gradients_of_others()
        gradients = [(host.averaged_gradients[i], host.params_in_partition[i]) for i in range(len(masters))]
        pieces = [list(pieces_of_master(*pair)) for pair in gradients]
        self.adam.run(list(map(Work, masters, host.optimizer.param_groups, pieces)), self.waits)
        host._lazy_init_hp_params_optimizer_state()
        self.drop_gradients()
        self.forget_skipped()
        return not host.overflow

    def update_split(self) -> bool:
        self._weights.point_params(keep_values=True)  # what a user assigns is the master, as what he writes in place
        self._drop_gradients_of_others()
        assert self.states is not None
        norm = self.states.update(*self.gradients(self.states))
        self.states.end_step(norm, self.waits)
        self.drop_gradients()
        return not self.states.is_skipped()

    @property
    def waits(self) -> bool:
        return self._host.check_grad_overflow

    def gradients(self, states: SplitStates) -> tuple[list[Tensor], list[Any]]:
        host, by_name = self._host, {}
        for i, params in enumerate(host.params_in_partition):
            pieces = [g for g in host.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            for p, grad in zip(params, pieces, strict=False):  # DeepSpeed may put a piece of padding last
                by_name[host.param_names[p]] = (grad.reshape(-1), p)
        found = [by_name[shard.name] for shard in states.core.shards]
        for (grad, _), shard in zip(found, states.core.shards, strict=True):
            assert grad.numel() == shard.numel, (shard.name, grad.numel(), shard.numel)
        return [grad for grad, _ in found], [p for _, p in found]

    def _drop_gradients_of_others(self) -> None:
        """Free gradients of parameters of which this rank updates nothing."""
        for p in chain.from_iterable(self._host.params_not_in_partition):
            p.grad = p.grad_accum = None

    def drop_gradients(self) -> None:
        for i, params in enumerate(self._host.params_in_partition):
            for p in params:
                p.grad = p.grad_accum = None
            self._host.averaged_gradients[i] = self._host.all_grad_tensors[i] = None


def expect_patched_gather() -> None:
    """Raise if DeepSpeed's gather is its own again: it would gather meta tensors, some backends in silence."""
    if not hasattr(stage_1_and_2.all_gather_dp_groups, "fp8_ds_original"):
        raise UnsupportedError(
            "fp8_ds.uninstall(): expected no engine in FP8 of ZeRO 1 or 2 in use after it, got a step of one, or a "
            "load. No weight was changed. Call it after engine.destroy() of the last of them."
        )


class Step3(ZeroStep):
    """Step of ZeRO-3. Work for the host alone, which grows with parameters, follows while the device updates."""

    _host: Host3

    def __init__(
        self, host: Host3, context: Fp8Context, states: SplitStates | None, release: ReleaseUpdater | None
    ) -> None:
        super().__init__(host, context, states, release)
        shards = [] if states is None else states.core.shards
        numels = {shard.name: shard.numel for shard in shards}
        self._numels = {id(p): numels.get(host.param_names[p]) for group in host.fp16_groups for p in group}
        """Elements of this rank's FP8 states by id of a parameter; None where it has none."""

    def run(self, original: Callable[[Any], None], closure: Any) -> None:
        """Step. `original`: DeepSpeed's step, which ends with `_post_step`, as ours does."""
        host, update = self._host, self.choose(self._host.fp32_partitioned_groups_flat)
        if update is None:
            original(closure)
            self.forget_skipped()
            return
        host._pre_step()
        if self.release is not None:
            self._wait_for_release()
        host.timers(STEP_TIMER).start()
        try:
            is_new = update()
        finally:
            host.timers(STEP_TIMER).stop()
        for i in range(len(host.fp16_groups)):
            host.averaged_gradients[i] = None
        if is_new:
            host._post_step({STEP_TIMER})

    def update_dense(self) -> bool:
        host, masters = self._host, self._host.fp32_partitioned_groups_flat
        assert self.adam is not None
        groups = [host.optimizer.param_groups[host.sub_group_to_group_id[i]] for i in range(len(masters))]
        pieces = [list(pieces_of_master(host.averaged_gradients[i], host.fp16_groups[i])) for i in range(len(masters))]
        self.adam.run(list(map(Work, masters, groups, pieces)), waits=True)
        self.drop_gradients()
        self.forget_skipped()
        for i in range(0 if host.overflow else len(masters)):
            host._reassign_or_swap_out_partitioned_parameters(i)
        return not host.overflow

    def update_split(self) -> bool:
        assert self.states is not None
        norm = self.states.update(*self.gradients(self.states))
        self.drop_gradients()
        self.states.end_step(norm, self.waits)
        return not self.states.is_skipped()

    def _wait_for_release(self) -> None:
        self._host._partition_all_parameters()
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().wait_stream(self._host.reduce_and_partition_stream)

    def drop_released(self) -> None:
        self._host.zero_grad(set_to_none=True)

    def gradients(self, states: SplitStates) -> tuple[list[Tensor], list[Any]]:
        grads, params = [], []
        for i, group in enumerate(self._host.fp16_groups):
            for p, grad in zip(group, self._host.averaged_gradients[i], strict=True):
                if (numel := self._numels[id(p)]) is not None:
                    grads.append(grad.reshape(-1)[:numel])
                    params.append(p)
        return grads, params

    def drop_gradients(self) -> None:
        """Release gathered weights, and drop gradients that no bucket has."""
        self._host._partition_all_parameters()
        self._host.zero_grad(set_to_none=True)
