"""HealthMonitor: samples a step now and then, and reports it one step later, when the host need not wait for it.

Gauges measure beside the layers' statistics, in sampled steps only. `attach` is called before such a step, `detach`
after it, and `read` one step later, when the next may be attached already.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8_ds.comm.collectives import HostCopy
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.sinks import STEP_SKIPPED, Change, Report
from fp8_ds.monitor.statistics import LayerStatistics, Observers, StatisticsTable, TensorStatistics


class GatherTimer:
    """Milliseconds for which the computing stream waits for gathers of weights in a step.

    Stages 1 and 2 gather at the end of a step, and all of it is waited for. Stage 3 gathers ahead, and what counts is
    the wait when a weight is needed: 0 if compute hides the gather. While attached, it wraps the method.

    Args:
        owner: the ZeRO optimizer (stages 1, 2) or its Fp8Shards.
        method: of `owner`, which gathers.
        waits: the method returns a handle, whose `wait` is what is timed.
    """

    name = "gather_ms"

    def __init__(self, owner: Any, method: str, waits: bool) -> None:
        self.owner = owner
        self.method = method
        self.waits = waits
        self._spans: list[tuple[Any, Any]] = []
        self._finished: list[tuple[Any, Any]] = []

    def attach(self) -> None:
        self._spans = []
        original = getattr(self.owner, self.method)
        setattr(self.owner, self.method, self._timed_handle(original) if self.waits else self._timed(original))

    def detach(self) -> None:
        delattr(self.owner, self.method)  # the class has it
        self._finished = self._spans  # of the step that is read while the next may be sampled already

    def read(self) -> float | None:
        """Return milliseconds of the last sampled step; None: there was no gather."""
        return sum(itertools.starmap(milliseconds, self._finished)) if self._finished else None

    def _timed(self, original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = mark()
            result = original(*args, **kwargs)
            self._spans.append((start, mark()))
            return result

        return timed

    def _timed_handle(self, original: Any) -> Any:
        # Not the handle with another `wait`: what it has gathered would stay until Python collects cycles.
        return lambda *args, **kwargs: SimpleNamespace(wait=self._timed(original(*args, **kwargs).wait))


class SkippedStep:
    """1 if the sampled step was skipped, else 0: also where the host learns that in the next step.

    Args:
        flag: returns that of the step that has ended: int32, 0-dim, on the device; None: there was no step.
    """

    name = STEP_SKIPPED

    def __init__(self, flag: Callable[[], Tensor | None]) -> None:
        self._flag = flag
        self._host: HostCopy | None = None

    def attach(self) -> None:
        """Do nothing: the flag is there in any step."""

    def detach(self) -> None:
        if (flag := self._flag()) is not None:
            self._host = self._host or HostCopy(flag)
            self._host.send(flag)

    def read(self) -> float | None:
        return None if self._host is None else float(bool(self._host.read()))


Gauge = GatherTimer | SkippedStep
Listener = Callable[[Report], None]


def mark() -> Any:
    """Record where the current stream of the device is, for `milliseconds`; on a CPU the host's time."""
    if get_accelerator().device_name() != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Return the time from one mark to another; wait until the device has passed it."""
    if isinstance(start, float):
        return float(1e3 * (end - start))
    end.synchronize()
    return float(start.elapsed_time(end))


class HealthMonitor:
    """Sampler of steps and reporter of their statistics, called after each optimizer step.

    Args:
        every: steps between samples; the sampled ones are the every-th, 2 every-th, ...
        table: of the layers; counts are the same on all ranks of its group.
        observers: of the same layers.
        gauges: for `Report.numbers`.
        facts: numbers that the host knows when a sampled step ends.
        warn: called with a line where a sink fails.

    Attributes:
        sinks: called with each report, and at the end of a run: they write, each rank for itself. One that raises is
            gone from then on, and training goes on.
        listeners: called after them; not at the end, when other ranks may be gone. On all ranks, in the same step on
            each, and with the same `layers` on ranks of one group: a guard can act on them. What they raise is raised.
        changes: by the guard, in no report yet.
    """

    def __init__(
        self,
        every: int,
        table: StatisticsTable,
        observers: Observers,
        gauges: Sequence[Gauge],
        facts: Callable[[], dict[str, float | None]],
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.every = every
        self.table = table
        self.observers = observers
        self.gauges = list(gauges)
        self.facts = facts
        self.warn = warn
        self.sinks: list[Listener] = []
        self.listeners: OrderedDict[int, Listener] = OrderedDict()
        self.changes: list[Change] = []
        self._is_sampling = False
        self._ended: Report | None = None  # of a sampled step that is over, and not reported yet
        self._is_on_its_way = False  # its statistics and the gauges' numbers are, from the device
        self._scales: dict[str, dict[str, tuple[float, int]]] = {}

    def listen(self, listener: Listener) -> RemovableHandle:
        """Call `listener` with each report from the next one on, until the handle's `remove()`.

        Raises:
            ConfigError: `listener` is one already.
        """
        if listener in self.listeners.values():
            raise ConfigError(f"listener: expected one that is not called yet, got {listener}. Add it once.")
        handle = RemovableHandle(self.listeners)
        self.listeners[handle.id] = listener
        return handle

    def start(self, step: int) -> None:
        """Count steps from `step` on; the first may be a sampled one. A sample in progress is dropped."""
        if self._stop_sampling():
            self.table.discard()
        self._sample_if_due(step, after_step=False)

    def after_step(self, step: int, samples: int) -> None:
        """End optimizer step number `step` (from 1), after so many samples in all: report the one before, if it was
        sampled. Collective."""
        self._report(tuple(self.listeners.values()))
        if self._stop_sampling():
            self.table.send()
            self._ended = Report(step, samples, {}, {}, self.facts(), list(self.changes))
            self._is_on_its_way = True
            self.changes.clear()
        self._sample_if_due(step)

    def flush(self) -> None:
        """Send the last report of a run, if it has not been sent, to the sinks; wait for its copy."""
        self._report(())

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types: a sample not yet seen, for which the host waits, and when scales last changed."""
        waiting = None if (ended := self._received()) is None else asdict(ended)
        if waiting is not None:
            del waiting["ages"]
        scales = {name: dict(kinds) for name, kinds in self._scales.items()}
        return {"waiting": waiting, "scales": scales, "changes": [asdict(change) for change in self.changes]}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore `state`, saved after `step` steps; `start` goes on from there.

        Args:
            state: layers that are not here any more are left out. None: nothing is known.
            step: a sample of another one is not taken over.
        """
        self._ended, self._is_on_its_way = None, False
        self._scales, self.changes = {}, []
        if state is None:
            return
        own = set(self.table.names)
        self._scales = {
            name: {kind: (scale, since) for kind, (scale, since) in kinds.items()}
            for name, kinds in state["scales"].items()
            if name in own
        }
        self.changes = _changes(state)
        waiting = state["waiting"]
        if waiting is not None and waiting["step"] == step:
            layers = {
                name: {kind: TensorStatistics(**one) for kind, one in kinds.items()}
                for name, kinds in waiting["layers"].items()
                if name in own
            }
            self._ended = Report(step, waiting["samples"], layers, {}, dict(waiting["numbers"]), _changes(waiting))

    def _report(self, listeners: Sequence[Listener]) -> None:
        """Send the report that waits to the sinks, then to `listeners`."""
        ended, self._ended = self._received(), None
        if ended is None:
            return
        report = replace(ended, ages=self._ages(ended.layers, ended.step))
        for sink in tuple(self.sinks):
            try:
                sink(report)
            except Exception as error:  # whatever a disk or a service on the network comes up with
                self.sinks.remove(sink)
                self.warn(
                    f"fp8: monitor, step {report.step}: {sink} failed ({type(error).__name__}: {str(error)[:300]}); it "
                    "gets no more reports, and training goes on"
                )
        for listener in listeners:
            listener(report)

    def _received(self) -> Report | None:
        """Return the sample that waits, on the host; its ages are not known yet."""
        if self._ended is not None and self._is_on_its_way:
            numbers = self._ended.numbers | {gauge.name: gauge.read() for gauge in self.gauges}
            self._ended = replace(self._ended, layers=self.table.receive() or {}, numbers=numbers)
            self._is_on_its_way = False
        return self._ended

    def _sample_if_due(self, step: int, *, after_step: bool = True) -> None:
        if (step + 1) % self.every == 0:
            self.observers.attach(after_step=after_step)
            for gauge in self.gauges:
                gauge.attach()
            self._is_sampling = True

    def _stop_sampling(self) -> bool:
        """Detach everything; return whether anything was attached. Collective then."""
        if not self._is_sampling:
            return False
        self._is_sampling = False
        for gauge in self.gauges:
            gauge.detach()
        self.observers.detach()
        return True

    def _ages(self, layers: LayerStatistics, step: int) -> dict[tuple[str, str], int | None]:
        ages: dict[tuple[str, str], int | None] = {}
        for name, kinds in layers.items():
            for kind, one in kinds.items():
                if not math.isfinite(one.scale):
                    ages[name, kind] = None
                    continue
                scale, since = self._scales.get(name, {}).get(kind, (None, step))
                if one.scale != scale:
                    since = step
                    self._scales.setdefault(name, {})[kind] = one.scale, since
                ages[name, kind] = step - since
        return ages


def _changes(saved: Mapping[str, Any]) -> list[Change]:
    """Read a state's changes; early checkpoints have none, others also layers that came back (`guard.return_after`)."""
    sent = (change for change in saved.get("changes", ()) if change.get("to", "bf16") == "bf16")
    return [Change(change["step"], change["layer"]) for change in sent]
