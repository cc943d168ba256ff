"""HealthMonitor: samples a step now and then, and reports it one step later, when the host need not wait for it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8_ds.comm.host_copy import HostCopy
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.sinks import STEP_SKIPPED, Change, Report
from fp8_ds.monitor.statistics import Observers, StatisticsTable, TensorStatistics

Listener = Callable[[Report], None]


class HealthMonitor:
    """Sampler of steps and reporter of their statistics, called after each optimizer step.

    Args:
        every: steps between samples; the sampled ones are the every-th, 2 every-th, ...
        table: of the layers; counts are the same on all ranks of its group.
        observers: of the same layers.
        facts: numbers that the host knows when a sampled step ends.
        skip_flag: returns whether the step that has ended was skipped (int32, 0-dim, on the device), which the host may
            not know yet; None: `facts` knows.
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
        facts: Callable[[], dict[str, float | None]],
        skip_flag: Callable[[], Tensor | None] = lambda: None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.every = every
        self.table = table
        self.observers = observers
        self.facts = facts
        self.skip_flag = skip_flag
        self.warn = warn
        self.sinks: list[Listener] = []
        self.listeners: OrderedDict[int, Listener] = OrderedDict()
        self.changes: list[Change] = []
        self._is_sampling = False
        self._ended: Report | None = None  # of a sampled step that is over, and not reported yet
        self._is_on_its_way = False  # its statistics are, from the device
        self._skipped: HostCopy | None = None

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
            if (flag := self.skip_flag()) is not None:
                self._skipped = self._skipped or HostCopy(flag)
                self._skipped.send(flag)
            self._ended = Report(step, samples, {}, self.facts(), list(self.changes))
            self._is_on_its_way = True
            self.changes.clear()
        self._sample_if_due(step)

    def flush(self) -> None:
        """Send the last report of a run, if it has not been sent, to the sinks; wait for its copy."""
        self._report(())

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types: a sample not yet seen, for which the host waits, and changes in no report yet."""
        waiting = None if (ended := self._received()) is None else asdict(ended)
        return {"waiting": waiting, "changes": [asdict(change) for change in self.changes]}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore `state`, saved after `step` steps; `start` goes on from there.

        Args:
            state: layers that are not here any more are left out. None: nothing is known.
            step: a sample of another one is not taken over.
        """
        self._ended, self._is_on_its_way = None, False
        self.changes = []
        if state is None:
            return
        self.changes = _changes(state)
        waiting = state["waiting"]
        if waiting is not None and waiting["step"] == step:
            layers = {
                name: {kind: TensorStatistics(**one) for kind, one in kinds.items()}
                for name, kinds in waiting["layers"].items()
                if name in self.table.names
            }
            self._ended = Report(step, waiting["samples"], layers, dict(waiting["numbers"]), _changes(waiting))

    def _report(self, listeners: Sequence[Listener]) -> None:
        """Send the report that waits to the sinks, then to `listeners`."""
        report, self._ended = self._received(), None
        if report is None:
            return
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
        """Return the sample that waits, on the host."""
        if self._ended is not None and self._is_on_its_way:
            numbers = dict(self._ended.numbers)
            if self._skipped is not None:
                numbers[STEP_SKIPPED] = float(bool(self._skipped.read()))
            self._ended = replace(self._ended, layers=self.table.receive(), numbers=numbers)
            self._is_on_its_way = False
        return self._ended

    def _sample_if_due(self, step: int, *, after_step: bool = True) -> None:
        if (step + 1) % self.every == 0:
            self.observers.attach(after_step=after_step)
            self._is_sampling = True

    def _stop_sampling(self) -> bool:
        """Detach the observers; return whether they were attached."""
        if not self._is_sampling:
            return False
        self._is_sampling = False
        self.observers.detach()
        return True


def _changes(saved: Mapping[str, Any]) -> list[Change]:
    """Read a state's changes; checkpoints of older versions have none, or none that came back."""
    return [Change(one["step"], one["layer"], one.get("to", "bf16")) for one in saved.get("changes", ())]
