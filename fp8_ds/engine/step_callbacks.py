"""Callbacks after each optimizer step of an engine: precision schedule, monitor and guard."""

from __future__ import annotations

import atexit
import copy
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8_ds.config.presets import is_written
from fp8_ds.engine.bf16_memory import Bf16Memory
from fp8_ds.engine.compat.config import total_steps
from fp8_ds.engine.precision import LayerPrecision, Request
from fp8_ds.engine.presets import ends_of, with_schedule
from fp8_ds.engine.ranks import say, say_problem, warn
from fp8_ds.engine.sizes import SizeDecision
from fp8_ds.errors import UnsupportedError
from fp8_ds.log import logger
from fp8_ds.monitor.guard import EVERY as GUARD_EVERY
from fp8_ds.monitor.guard import Guard, Problems
from fp8_ds.monitor.health import HealthMonitor, Listener
from fp8_ds.monitor.overshoot import Overshoots, tables_of
from fp8_ds.monitor.scale_check import ScaleCheck
from fp8_ds.monitor.sinks import STEP_SKIPPED, Change, DeepSpeedEvents, JsonLines
from fp8_ds.monitor.statistics import Observers, StatisticsTable
from fp8_ds.nn.plan.convert import INPUT_SLOTS, fp8_layers
from fp8_ds.numerics.scale import AmaxHistory

_NUM_SKIPPED = 3
"""Steps skipped in a row that are worth a line; now and then one is skipped in a healthy run."""
Say = Callable[[str], None]


class StepCallbacks:
    """Callbacks of one engine, which runs them after each step.

    Args:
        engine: built, with its ZeRO optimizer and layers in FP8.

    Attributes:
        precision: which layers compute in bf16.
        sizes: decides which of them are too small for FP8.
        monitor: samples steps for reports, and for a guard without delayed scales; None if neither is on.
        guard: listener of the monitor, or, with delayed scales, judge of the history's overshoots; None if it is off.
        has_graph: whether a forward has kept tensors for its backward and no step has followed: layers cannot change.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.has_graph = False
        self._amaxes_before_evaluation: Tensor | None = None
        self._is_running = False
        self._num_skipped = 0
        self._overshoots: Overshoots | None = None
        self._first_micro_step: int = engine.micro_steps
        schedule, total = engine.fp8.config.schedule, total_steps(engine._config._param_dict)
        num_steps = total if isinstance(total, int) else None
        may_miss = not is_written(engine._config._param_dict["fp8"], "schedule", "layers")
        self.precision = engine.fp8.precision = LayerPrecision(
            engine.module, engine.optimizer.fp8.set_bf16, schedule, num_steps, say, may_miss
        )
        self._last_save: int | None = None
        self._memory = Bf16Memory.of(engine)
        self._update_precision()
        self.sizes = SizeDecision(engine, self.precision)
        _check_scales(engine)
        self.monitor: HealthMonitor | None = None
        self.guard: Guard | None = None
        self._guard_handle: RemovableHandle | None = None
        if engine.fp8.config.guard.action is not None:
            self.guard = make_guard(engine, self._send, say_problem)
        self._start_watching()
        if self.monitor is not None:
            self.monitor.start(engine.global_steps)
        close = weakref.WeakMethod(self.close)  # an engine may live until the process ends, not destroyed
        atexit.register(lambda: None if (last := close()) is None else last())

    def _start_watching(self) -> None:
        """Make what the guard judges by, overshoots or a monitor's samples, and the monitor that the user asked for.

        The recipe decides, which a checkpoint may have changed, and not whether this rank has layers with a history: a
        pipeline's stage may have none, and takes part in what the guard shares.
        """
        context, settings = self._engine.fp8, self._engine.fp8.config.monitor
        is_delayed = context.config.linear.recipe == "delayed"
        is_sampled = self.guard is not None and not is_delayed
        history: AmaxHistory | None = context.history
        self._overshoots = None
        if self.guard is not None and is_delayed:
            nothing = (), torch.empty(0, dtype=torch.float32, device=self._engine.device)
            self._overshoots = Overshoots(*nothing if history is None else (history.names, history.fp8_max))
            self._overshoots.leave_out(self.precision.in_bf16)
        if history is not None:
            history.overshoots = self._overshoots
        if not (settings.every or is_sampled):
            self.monitor = None
        elif self.monitor is None:
            every, sinks = (settings.every, settings.sinks) if settings.every else (GUARD_EVERY, ())
            self.monitor = health_monitor(self._engine, every, sinks, partial(warn, rank=self._engine.global_rank))
        if self._guard_handle is not None and not is_sampled:
            self._guard_handle.remove()
            self._guard_handle = None
        elif self._guard_handle is None and self.guard is not None and self.monitor is not None and is_sampled:
            self._guard_handle = self.monitor.listen(self.guard)

    def before_forward(self, is_training: bool, batch: Any) -> None:
        """Prepare for a forward that keeps what a backward needs. Collective if it decides on sizes.

        Amaxes of an evaluation that is not under `no_grad` are kept apart from those of the step, with delayed scales.
        A later forward in training mode shows that it was an evaluation. If the step has none, the amaxes count: a
        model may train in evaluation mode, as one from `from_pretrained` does until `train()` is called.

        Args:
            batch: the forward's arguments.
        """
        if self.sizes.is_open:
            self.sizes.see(batch)
        if is_training:
            self._forget_evaluations()
            if self.sizes.is_open and not self._between():
                self.sizes.decide()
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
            if self.sizes.is_open:  # all forwards were in evaluation mode, or the engine was compiled after them
                self.sizes.decide()
            if self._memory is not None and self._memory.after_step() is False:
                self._leave_out_last_steps()
            if not self.precision.schedule.is_constant:
                self._update_precision()
            self._judge_overshoots()
            if self.monitor is not None:  # last: what it samples is the next step's, with layers as they are in it
                self.monitor.after_step(self._engine.global_steps, self._engine.global_samples)
        finally:
            self._is_running = False

    def _judge_overshoots(self) -> None:
        """Let the guard judge the last interval of steps, a step after it. Collective."""
        if self._overshoots is None or self.guard is None:
            return
        step = self._engine.global_steps
        if (found := self._overshoots.problems()) is not None:  # of layers that have left FP8 since, too
            in_fp8 = {layer: text for layer, text in found.items() if layer not in self.precision.in_bf16}
            self.guard.judge(step - 1, in_fp8)
        if step % GUARD_EVERY == 0:
            self._overshoots.send()

    def _leave_out_last_steps(self) -> None:
        """Keep the first and last layer in bf16 from now on, and no steps at the end, which do not fit into memory."""
        context, names = self._engine.fp8, self.precision.names
        ends = {end: "bf16" for end in ends_of(self._engine.module) if any(name.startswith(end) for name in names)}
        layers = {**ends, **context.config.schedule.layers}
        context.config = with_schedule(context.config, layers=layers, bf16_last_fraction=0.0, total_steps=None)
        self.precision.change(context.config.schedule, lambda: None)
        self._update_precision()
        instead = " The first and last layer compute in bf16 from here on instead." if ends else ""
        say_problem(
            "fp8: the last steps of this run stay in FP8, for in bf16 they might not fit into a GPU's memory."
            f"{instead} To have the last steps in bf16 all the same, "
            'write "schedule": {"bf16_last_fraction": 0.03}; a smaller micro-batch makes room'
        )

    def note_save(self) -> None:
        """Remember that weights of this step have been saved."""
        self._last_save = self._engine.global_steps

    def _tell_of_skipped(self) -> None:
        """Log one line for each run of skipped steps. The host may know of them a step late."""
        self._num_skipped = 0 if self._engine.was_step_applied() else self._num_skipped + 1
        if self._num_skipped == _NUM_SKIPPED:
            say_problem(
                f"fp8: {_NUM_SKIPPED} steps in a row were skipped, up to step {self._engine.global_steps}: a gradient "
                "was infinite or NaN in each. If the loss is NaN too, look for NaN in engine.module.state_dict(), at "
                "what was last written into weights, and load a checkpoint; else look at the batches. More in "
                "docs/troubleshooting.md"
            )

    def set_layer_precision(self, names: str | Collection[str], precision: Request) -> list[str]:
        """See `Fp8Engine.set_layer_precision`."""
        asked = [names] if isinstance(names, str) else sorted(names)  # a set has another order on each rank
        layers = self._request(asked, precision)
        if self.guard is not None:
            self.guard.forget(layers)
        return [layer for layer in layers if layer in self.precision.names]

    def _request(self, names: Sequence[str], precision: Request) -> list[str]:
        layers = self.precision.request(names, precision, self._between())
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
        if self.sizes.is_open:  # until the next forward decides
            self.precision.too_small = self.precision.unrecorded
        self._memory = Bf16Memory.of(self._engine)
        self.precision.tell_of_resume(self._engine.global_steps)
        self._update_precision()
        state = {} if state is None else state  # of an older version without "overshoots"
        self._start_watching()
        if self.guard is not None:
            self.guard.load_state_dict(state.get("guard"))
        if self._overshoots is not None:
            self._overshoots.load_state_dict(state.get("overshoots"))
        if self.monitor is not None:
            self.monitor.load_state_dict(state.get("monitor"), self._engine.global_steps)
            self.monitor.start(self._engine.global_steps)

    def wrong_state(self, state: Any) -> str:
        """Say why `resume` cannot go on from `state`; empty if it can. Nothing is changed."""
        if state is None:
            return ""
        try:
            if self.monitor is not None and (sampled := state["monitor"]) is not None:
                waiting = sampled["waiting"]
                copy.copy(self.monitor).load_state_dict(sampled, -1 if waiting is None else waiting["step"])
            if self.guard is not None:
                copy.copy(self.guard).load_state_dict(state["guard"])
            if self._overshoots is not None and state.get("overshoots") is not None:
                tables_of(state["overshoots"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of monitor, guard and overshoots in builtin types; None if none is on.

        It is of this rank's layers: each pipeline stage and tensor-parallel rank has a model file of its own.
        """
        parts = {"monitor": self.monitor, "guard": self.guard, "overshoots": self._overshoots}
        states = {key: None if part is None else part.state_dict() for key, part in parts.items()}
        return states if any(states.values()) else None

    def close(self) -> None:
        """Write the last report, and say so if what was saved last is of a run that ends before its bf16 steps."""
        if self.monitor is not None:
            self.monitor.flush()
        last, step = self.precision.schedule.last, self._engine.global_steps
        if last is not None and self._last_save is not None and step < last and self._engine.global_rank == 0:
            logger.info(  # not `say`: process groups may be gone
                f"fp8: this run ends at step {step}, before the bf16 steps that it was to end with (from step {last} "
                f"on): what was saved at step {self._last_save} has a loss that these would lower by some 0.1 %. To "
                'have them, resume with the number of steps that you want in "schedule": {"total_steps": ...}'
            )
        self._last_save = None

    def _update_precision(self) -> None:
        before = self.precision.in_bf16
        self.precision.update(self._engine.global_steps)
        if self._overshoots is not None and self.precision.in_bf16 != before:
            self._overshoots.leave_out(self.precision.in_bf16)

    def _send(self, names: Sequence[str], to: Literal["bf16", "schedule"]) -> None:
        """Send layers to bf16, or back, from the next step on, as the guard decides alike on all ranks. Collective."""
        self._request(names, to)
        if self.monitor is not None:
            self.monitor.changes.extend(Change(self._engine.global_steps, name, to) for name in names)

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
        tell = (
            say_problem if rank == 0 else partial(warn, rank=rank)
        )  # of another pipeline stage, or part of its layers
        history.check = ScaleCheck(history.names, history.amax_local, history.fp8_max, tell)


def health_monitor(engine: Any, every: int, sinks: Sequence[str], warn: Say) -> HealthMonitor:
    """Build the monitor that samples the FP8 layers of `engine`, not started yet.

    Args:
        engine: built, with its ZeRO optimizer.
        every: steps between samples.
        sinks: "deepspeed", or paths; none: nothing is written.
        warn: called with a line of this rank where a sink fails.
    """
    context, optimizer = engine.fp8, engine.optimizer
    group = optimizer.dp_process_group
    found = fp8_layers(engine.module)
    table = StatisticsTable(tuple(found), engine.device, group)
    sizes = {row.fqn: row.numel for row in context.plan.layers}

    def facts() -> dict[str, float | None]:
        in_bf16 = context.precision.ended_in_bf16
        in_fp8 = sum(sizes[fqn] for fqn in found if fqn in sizes and fqn not in in_bf16)
        last = context.counter.last
        return {
            "coverage": in_fp8 / max(sum(sizes.values()), 1),
            "layers_in_bf16": len(in_bf16),
            "skipped_steps": engine.skipped_steps,
            STEP_SKIPPED: float(not engine.was_step_applied()),
            "gathered_bytes": None if last is None else last.total,
            "gathered_fp8_bytes": None if last is None else last.fp8,
        }

    def skip_flag() -> Tensor | None:
        states = optimizer.fp8.masters.states
        return None if states is None else states.flag.last

    health = HealthMonitor(every, table, Observers(found, table, engine.module), facts, skip_flag, warn)
    for sink in sinks:
        health.sinks.extend(_listener(engine, sink, group))
    return health


def make_guard(engine: Any, send: Callable[[Sequence[str], Literal["bf16", "schedule"]], object], say: Say) -> Guard:
    """Build the guard, which acts on all ranks alike once it is told of samples or overshoots.

    Raises:
        UnsupportedError: the guard shall send layers to bf16, and there are tensor-parallel ones.
    """
    action, group = engine.fp8.config.guard.action, engine.optimizer.dp_process_group
    parallel = [name for name, layer in fp8_layers(engine.module).items() if layer.is_parallel]
    if action == "bf16" and parallel:
        raise UnsupportedError(
            f'fp8.guard.action: expected "report" with tensor-parallel layers, got "bf16" with {parallel[0]}. Their '
            'gathers move FP8 only: set "report", and leave out what misbehaves by linear.filter_fqns.'
        )

    def share(mine: Problems) -> Problems:
        if dist.get_world_size(group) == dist.get_world_size():
            return mine  # what it judges by is that of all ranks
        everyone: list[Problems] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {name: problem for each in everyone for name, problem in each.items()}

    return Guard(share, send, engine.fp8.precision.names if action == "bf16" else (), say)


def _listener(engine: Any, sink: str, group: Any) -> list[Listener]:
    """Return this rank's writers: rank 0 has DeepSpeed's monitor, one rank of each data-parallel group a file."""
    rank = ds_comm.get_rank()
    if sink == "deepspeed":
        return [DeepSpeedEvents(engine.monitor)] if rank == 0 else []
    if dist.get_rank(group) != 0:
        return []
    path = Path(os.path.expanduser(sink))  # `~` at its beginning is the user's home, as a shell reads it
    return [JsonLines(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))]
