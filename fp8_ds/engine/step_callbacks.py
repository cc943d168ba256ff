"""Callbacks after each optimizer step of an engine: precision schedule, monitor, and the guard behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8_ds.engine.health import Health
from fp8_ds.engine.log import say, warn
from fp8_ds.engine.precision import LayerPrecision, Request
from fp8_ds.engine.startup import total_steps
from fp8_ds.monitor.sinks import Change
from fp8_ds.nn.convert import INPUT_SLOTS
from fp8_ds.scaling.delayed import AmaxHistory
from fp8_ds.scaling.scale_check import ScaleCheck

_NUM_SKIPPED = 3
"""Steps skipped in a row that are worth a line; now and then one is skipped in a healthy run."""


class StepCallbacks:
    """Callbacks of one engine, which runs them after each step.

    Args:
        engine: built, with its ZeRO optimizer and layers in FP8.

    Attributes:
        precision: which layers compute in bf16.
        health: monitor and guard; None if neither is on.
        has_graph: whether a forward has kept tensors for its backward and no step has followed: layers cannot change.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.has_graph = False
        self._amaxes_before_evaluation: Tensor | None = None
        self._is_running = False
        self._num_skipped = 0
        self._first_micro_step: int = engine.micro_steps
        schedule, total = engine.fp8.config.schedule, total_steps(engine._config._param_dict)
        num_steps = total if isinstance(total, int) else None
        self.precision = engine.fp8.precision = LayerPrecision(
            engine.module, engine.optimizer.fp8_set_bf16, schedule, num_steps, engine.device, say
        )
        self._update_precision()
        _check_scales(engine)
        self.health = Health.of(engine, self._send_to_bf16, say, partial(warn, rank=engine.global_rank))
        if self.health is not None:
            self.health.monitor.start(engine.global_steps)

    def before_forward(self, is_training: bool) -> None:
        """Keep amaxes of an evaluation that is not under `no_grad` apart from those of the step, with delayed scales.

        A later forward in training mode shows that it was an evaluation. If the step has none, the amaxes count: a
        model may train in evaluation mode, as one from `from_pretrained` does until `train()` is called.
        """
        if is_training:
            self._forget_evaluations()
        elif self._amaxes_before_evaluation is None and (history := self._engine.fp8.history) is not None:
            # Of inputs alone: the backward of a forward before may come in between.
            self._amaxes_before_evaluation = history.amax_local[INPUT_SLOTS].clone()

    def before_step(self) -> None:
        """Prepare for the optimizer's step."""
        if self.has_graph:
            self._forget_evaluations()

    def _forget_evaluations(self) -> None:
        if self._amaxes_before_evaluation is not None:
            self._engine.fp8.history.amax_local[INPUT_SLOTS] = self._amaxes_before_evaluation
            self._amaxes_before_evaluation = None

    def leave_out_evaluations(self, history: dict[str, Any] | None) -> None:
        """Remove from a checkpoint's `history` what evaluations since the last step have recorded."""
        if history is not None and self._amaxes_before_evaluation is not None:
            history["amax_local"][INPUT_SLOTS] = self._amaxes_before_evaluation

    def after_step(self) -> None:
        """Run the callbacks that are on, in a fixed order, on all ranks alike. Collective."""
        self.has_graph = False
        self._amaxes_before_evaluation = None
        self._first_micro_step = self._engine.micro_steps + 1  # DeepSpeed counts the one that ends after this
        self._tell_of_skipped()
        self._is_running = True
        self.precision.ended_in_bf16 = self.precision.in_bf16
        try:
            if not self.precision.schedule.is_constant:
                self._update_precision()
            if self.health is not None:  # last: what it samples is the next step's, with layers as they are in it
                self.health.monitor.after_step(self._engine.global_steps, self._engine.global_samples)
        finally:
            self._is_running = False

    def _tell_of_skipped(self) -> None:
        """Log one line for each run of skipped steps. The host may know of them a step late."""
        self._num_skipped = 0 if self._engine.was_step_applied() else self._num_skipped + 1
        if self._num_skipped == _NUM_SKIPPED:
            say(
                f"fp8: {_NUM_SKIPPED} steps in a row were skipped, up to step {self._engine.global_steps}: a gradient "
                "was infinite or NaN in each. If the loss is NaN too, look for NaN in engine.module.state_dict(), at "
                "what was last written into weights, and load a checkpoint; else look at the batches. More in "
                "docs/troubleshooting.md"
            )

    def set_layer_precision(self, names: str | Collection[str], precision: Request) -> list[str]:
        """See `Fp8Engine.set_layer_precision`."""
        asked = [names] if isinstance(names, str) else sorted(names)  # a set has another order on each rank
        layers = self.precision.request(asked, precision, self._between())
        self._update_precision()
        return layers

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint that has been loaded, precision and step count with it. Collective.

        Args:
            state: from `state_dict`; None: the checkpoint has none.
        """
        self.has_graph = False
        self._amaxes_before_evaluation = None
        self._first_micro_step = self._engine.micro_steps
        self._update_precision()
        if self.health is not None:
            self.health.load_state_dict(state, self._engine.global_steps)
            self.health.monitor.start(self._engine.global_steps)

    def wrong_state(self, state: Any) -> str:
        """Say why `resume` cannot go on from `state`; empty if it can. Nothing is changed."""
        return "" if self.health is None or state is None else self.health.wrong_state(state)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of monitor and guard in builtin types; None if neither is on."""
        return None if self.health is None else self.health.state_dict()

    def close(self) -> None:
        """Write the last report."""
        if self.health is not None:
            self.health.monitor.flush()

    def _update_precision(self) -> None:
        self.precision.update(self._engine.global_steps)

    def _send_to_bf16(self, names: Sequence[str]) -> None:
        """Send layers to bf16 from the next step on, as the guard decides alike on all ranks. Collective."""
        self.set_layer_precision(names, "bf16")
        step = self._engine.global_steps
        assert self.health is not None
        self.health.monitor.changes.extend(Change(step, name) for name in names)

    def _between(self) -> str:
        """Say where this rank is between a forward and the step that follows; empty if it is not between them."""
        if self._is_running:
            return ""
        if (done := self._engine.micro_steps - self._first_micro_step) > 0:
            return f"after micro-batch {done} of {self._engine.gradient_accumulation_steps()}"
        return "between a forward and its step" if self.has_graph else ""


def _check_scales(engine: Any) -> None:
    """Let one rank of each ZeRO group, which shares its delayed scales, name those that do not fit."""
    history: AmaxHistory | None = engine.fp8.history
    if history is not None and dist.get_rank(engine.optimizer.dp_process_group) == 0:
        rank = engine.global_rank
        tell = say if rank == 0 else partial(warn, rank=rank)  # of another pipeline stage, or part of its layers
        history.check = ScaleCheck(history.names, history.amax_local, history.fp8_max, tell)
