"""Guard: it names layers whose tensors do not fit FP8, and sends them to bf16 if the configuration says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fp8_ds.monitor.sinks import STEP_SKIPPED, Report
from fp8_ds.monitor.statistics import LayerStatistics

EVERY = 100
"""Steps between the samples it judges by, where `monitor.every` is 0."""
SATURATION = 0.01
UNDERFLOW = 0.2
"""Shares of a tensor above which its layer does not fit FP8."""
_NUM_SHOWN = 4

Problems = dict[str, tuple[str, bool]]
"""Layer -> what is wrong, and whether it can go to bf16."""


class Guard:
    """A listener of the health monitor.

    A layer is named when it passes a limit, and again only after a sample in which it did not, or was in bf16.

    Args:
        share: what is wrong on each rank -> what is on any, the same on all: pipeline stages have layers of their own.
            Collective.
        to_bf16: sends layers there, given the same names on all ranks.
        changeable: layers of this rank that it may send; others are only named.
        say: called with a line for rank 0.
    """

    def __init__(
        self,
        share: Callable[[Problems], Problems],
        to_bf16: Callable[[Sequence[str]], object],
        changeable: Collection[str],
        say: Callable[[str], None],
    ) -> None:
        self._share = share
        self._to_bf16 = to_bf16
        self._changeable = changeable
        self._say = say
        self._named: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types, the same on all ranks: the layers that misbehaved in the last sample."""
        return {"named": sorted(self._named)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None: no layer has misbehaved."""
        self._named = set() if state is None else set(state["named"])

    def __call__(self, report: Report) -> None:
        """Judge a report. Collective, over all ranks. A skipped step tells nothing of layers: one NaN is in all."""
        if report.numbers.get(STEP_SKIPPED):
            return
        found = problems(report.layers)
        everywhere = self._share({name: (text, name in self._changeable) for name, text in found.items()})
        new = {name: problem for name, problem in everywhere.items() if name not in self._named}
        self._named = set(everywhere)
        if not new:
            return
        names = sorted(new)
        shown = "; ".join(f"{name}: {new[name][0]}" for name in names[:_NUM_SHOWN])
        more = f"; and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        if sent := [name for name in names if new[name][1]]:
            self._to_bf16(sent)
            action = (
                f'{len(sent)} compute in bf16 from the next step on; engine.set_layer_precision(name, "fp8") undoes it'
            )
        else:
            action = 'To compute them in bf16: engine.set_layer_precision, or fp8.guard.action "bf16"'
        self._say(f"fp8: guard, step {report.step}: {len(names)} layers do not fit FP8 ({shown}{more}). {action}")


def problems(layers: LayerStatistics) -> dict[str, str]:
    """Return layer -> which of its tensors passes which limit by how much; layers within the limits are missing."""
    found: dict[str, list[str]] = {}
    for name, kinds in layers.items():
        for kind, one in kinds.items():
            for what, share, limit in (
                ("saturation", one.saturation, SATURATION),
                ("underflow", one.underflow, UNDERFLOW),
            ):
                if share > limit:
                    found.setdefault(name, []).append(f"{what} of {kind} {share:.2g} above {limit:g}")
    return {name: ", ".join(lines) for name, lines in found.items()}
