"""The health monitor of one engine, and its guard."""

from __future__ import annotations

import atexit
import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import comm as ds_comm

from fp8_ds.errors import UnsupportedError
from fp8_ds.monitor.gauges import GatherTimer, Gauge, SkippedStep
from fp8_ds.monitor.guard import EVERY as GUARD_EVERY
from fp8_ds.monitor.guard import Guard, Problems
from fp8_ds.monitor.health import HealthMonitor, Listener
from fp8_ds.monitor.observe import Observers
from fp8_ds.monitor.sinks import STEP_SKIPPED, DeepSpeedEvents, JsonLines
from fp8_ds.monitor.statistics import StatisticsTable
from fp8_ds.nn.layers import fp8_layers

Say = Callable[[str], None]


class Health:
    """Monitor and guard of one engine, and what checkpoints keep of them.

    Args:
        monitor: a monitor that is not started yet.
        guard: a listener of the monitor; None if there is no guard.
    """

    def __init__(self, monitor: HealthMonitor, guard: Guard | None) -> None:
        self.monitor = monitor
        self.guard = guard

    @classmethod
    def of(cls, engine: Any, to_bf16: Callable[[Sequence[str]], object], say: Say, warn: Say) -> Health | None:
        """Build monitor and guard as configured for `engine`; None if it has neither.

        Args:
            engine: built, with its ZeRO optimizer and the precision of its layers.
            to_bf16: called by the guard to send layers to bf16, with the same names on all ranks.
            say: called with a line for rank 0.
            warn: called with a line of this rank.

        Raises:
            UnsupportedError: the guard shall send layers to bf16, and they are tensor-parallel.
        """
        settings, guards = engine.fp8.config.monitor, engine.fp8.config.guard.action is not None
        if not settings.every and not guards:
            return None
        every, sinks = (settings.every, settings.sinks) if settings.every else (GUARD_EVERY, ())
        monitor = health_monitor(engine, every, sinks, warn)
        guard = make_guard(engine, to_bf16, say) if guards else None
        if guard is not None:
            monitor.listen(guard)
        flush = weakref.WeakMethod(monitor.flush)  # an engine may live until the process ends, and not be destroyed
        atexit.register(lambda: None if (last := flush()) is None else last())
        return cls(monitor, guard)

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types for this rank's layers: each pipeline stage and tensor-parallel rank has its file."""
        guard = None if self.guard is None else self.guard.state_dict()
        return {"monitor": self.monitor.state_dict(), "guard": guard}

    def wrong_state(self, state: Any) -> str:
        """Say why `load_state_dict` cannot take over `state`; empty if it can. Nothing is changed."""
        try:
            waiting = state["monitor"]["waiting"]
            copy.copy(self.monitor).load_state_dict(state["monitor"], -1 if waiting is None else waiting["step"])
            if self.guard is not None:
                copy.copy(self.guard).load_state_dict(state["guard"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore `state`, saved after `step` steps; None: start anew. Call `monitor.start` afterwards."""
        self.monitor.load_state_dict(None if state is None else state["monitor"], step)
        if self.guard is not None:
            self.guard.load_state_dict(None if state is None else state["guard"])


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
    if (shards := getattr(optimizer, "_fp8_shards", None)) is None:
        gauges: list[Gauge] = [GatherTimer(optimizer, "_fp8_gather_all", waits=False)]
    else:
        gauges = [GatherTimer(shards, "gather", waits=True)]
    if context.config.optimizer.states == "fp8":
        gauges.append(SkippedStep(lambda: optimizer.fp8_flag.last))
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

    health = HealthMonitor(every, table, Observers(found, table, engine.module), gauges, facts, warn)
    for sink in sinks:
        health.sinks.extend(_listener(engine, sink, group))
    return health


def make_guard(engine: Any, to_bf16: Callable[[Sequence[str]], object], say: Say) -> Guard:
    """Build the guard, which acts on all ranks alike once a health monitor calls it.

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
            return mine  # counts were added up over all ranks
        everyone: list[Problems] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {name: problem for each in everyone for name, problem in each.items()}

    return Guard(share, to_bf16, engine.fp8.precision.names if action == "bf16" else (), say)


def _listener(engine: Any, sink: str, group: Any) -> list[Listener]:
    """Return this rank's writers: rank 0 has DeepSpeed's monitor, one rank of each data-parallel group a file."""
    rank = ds_comm.get_rank()
    if sink == "deepspeed":
        return [DeepSpeedEvents(engine.monitor)] if rank == 0 else []
    if dist.get_rank(group) != 0:
        return []
    path = Path(os.path.expanduser(sink))  # `~` at its beginning is the user's home, as a shell reads it
    return [JsonLines(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))]
