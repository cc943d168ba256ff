"""HealthMonitor: samples a step now and then, and reports it one step later, when the host need not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8_ds.monitor.gauges import Gauge
from fp8_ds.monitor.observe import Observers
from fp8_ds.monitor.sinks import Report
from fp8_ds.monitor.statistics import LayerStatistics, StatisticsTable

Listener = Callable[[Report], None]


class HealthMonitor:
    """Called after each optimizer step.

    Args:
        every: steps between samples; the sampled ones are the every-th, 2 every-th, ...
        table: of the layers; counts are the same on all ranks of its group.
        observers: of the same layers.
        gauges: for `Report.numbers`.
        facts: numbers that the host knows when a sampled step ends.

    Attributes:
        sinks: called with each report, and at the end of a run: they write, each rank for itself.
        listeners: called after them; not at the end, when other ranks may be gone. On all ranks, in the same step on
            each, and with the same `layers` on ranks of one group: a guard can act on them.
    """

    def __init__(
        self,
        every: int,
        table: StatisticsTable,
        observers: Observers,
        gauges: Sequence[Gauge],
        facts: Callable[[], dict[str, float | None]],
    ) -> None:
        assert every > 0
        self.every = every
        self.table = table
        self.observers = observers
        self.gauges = list(gauges)
        self.facts = facts
        self.sinks: list[Listener] = []
        self.listeners: list[Listener] = []
        self._is_sampling = False
        self._ended: tuple[int, int, dict[str, float | None]] | None = None
        self._scales: dict[tuple[str, str], tuple[float, int]] = {}

    def start(self, step: int) -> None:
        """Steps are counted from `step` on; the first may be a sampled one."""
        self._sample_if_due(step)

    def after_step(self, step: int, samples: int) -> None:
        """Optimizer step number `step` (from 1) has ended: report the one before, if it was sampled. Collective.

        Args:
            step: engine.global_steps.
            samples: engine.global_samples.
        """
        self._report(self.sinks + self.listeners)
        if self._is_sampling:
            for gauge in self.gauges:
                gauge.detach()
            self.observers.detach()
            self.table.send()
            self._ended = step, samples, self.facts()
            self._is_sampling = False
        self._sample_if_due(step)

    def flush(self) -> None:
        """The last report of a run, if there is one that has not been, to the sinks; waits for its copy."""
        self._report(self.sinks)

    def _report(self, listeners: Sequence[Listener]) -> None:
        if self._ended is None:
            return
        layers = self.table.receive()
        assert layers is not None
        step, samples, facts = self._ended
        self._ended = None
        numbers = {**facts, **{gauge.name: gauge.read() for gauge in self.gauges}}
        report = Report(step, samples, layers, self._ages(layers, step), numbers)
        for listener in listeners:
            listener(report)

    def _sample_if_due(self, step: int) -> None:
        if (step + 1) % self.every == 0:
            self.observers.attach()
            for gauge in self.gauges:
                gauge.attach()
            self._is_sampling = True

    def _ages(self, layers: LayerStatistics, step: int) -> dict[tuple[str, str], int]:
        ages: dict[tuple[str, str], int] = {}
        for name, kinds in layers.items():
            for kind, one in kinds.items():
                scale, since = self._scales.get((name, kind), (None, step))
                if one.scale != scale:
                    since = step
                    self._scales[name, kind] = one.scale, since
                ages[name, kind] = step - since
        return ages
