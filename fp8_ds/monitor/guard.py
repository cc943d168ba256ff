"""Guard: it names layers whose tensors do not fit FP8, and sends them to bf16 for a while if asked to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from fp8_ds.monitor.sinks import STEP_SKIPPED, Report
from fp8_ds.monitor.statistics import LayerStatistics

EVERY = 100
"""Steps between its judgements, where it does not judge by the samples of `monitor.every`."""
SATURATION = 0.01
"""Share of a tensor above which its layer does not fit FP8."""
UNDERFLOW = 0.2
"""The same of an input or weight. Gradients have no such limit: where a few tokens' are large, most elements are small
beside them and add nothing, up to 0.93 of a layer in trainings that go well (benchmarks/results/2026-11-29-guard.md).
"""
NUM_STEPS_IN_BF16 = 1000
"""Steps that a layer stays in bf16 the first time; each time that it is sent again twice as many as the last."""
_NUM_SHOWN = 4

Problems = dict[str, tuple[str, bool]]
"""Layer -> what is wrong, and whether it can go to bf16."""


class Guard:
    """Judge of layers: a listener of the health monitor, or, with delayed scales, told of overshoots.

    A layer is named when it passes a limit, and again only after a judgement at which it did not, or was in bf16. One
    that was sent to bf16 comes back by itself, after a stay twice as long as its last.

    Args:
        share: what is wrong on each rank -> what is on any, the same on all: pipeline stages have layers of their own.
            Collective.
        send: sends layers to bf16, or back, given the same names on all ranks.
        changeable: layers of this rank that it may send; others are only named.
        say: called with a line for rank 0.
    """

    def __init__(
        self,
        share: Callable[[Problems], Problems],
        send: Callable[[Sequence[str], Literal["bf16", "schedule"]], object],
        changeable: Collection[str],
        say: Callable[[str], None],
    ) -> None:
        self._share = share
        self._send = send
        self._changeable = changeable
        self._say = say
        self._named: set[str] = set()
        self._stays: dict[str, tuple[int, int]] = {}
        """Layer -> length of its last stay in bf16, and the step at which it ends; 0: it is over."""

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types, the same on all ranks: the layers named at the last judgement, and stays."""
        return {"named": sorted(self._named), "stays": {name: list(stay) for name, stay in self._stays.items()}}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None: no layer has misbehaved."""
        self._named = set() if state is None else set(state["named"])
        stays: Mapping[str, Any] = {} if state is None else state.get("stays", {})  # an older version's has none
        self._stays = {name: (int(length), int(until)) for name, (length, until) in stays.items()}

    def forget(self, names: Collection[str]) -> None:
        """Leave layers, the same on all ranks, as a user has set them: they do not come back by themselves."""
        for name in names:
            self._stays.pop(name, None)

    def __call__(self, report: Report) -> None:
        """Judge a report. Collective, over all ranks. A skipped step tells nothing of layers: one NaN is in all."""
        self.judge(report.step, None if report.numbers.get(STEP_SKIPPED) else problems(report.layers))

    def judge(self, step: int, found: Mapping[str, str] | None) -> None:
        """Name the layers in `found` that are not named yet, and send them to bf16. Collective, over all ranks.

        Args:
            step: the last that was looked at.
            found: layer of this rank -> what is wrong with it; None: nothing is known of any.
        """
        self._end_stays(step)
        if found is None:
            return
        everywhere = self._share({name: (text, name in self._changeable) for name, text in found.items()})
        new = {name: problem for name, problem in everywhere.items() if name not in self._named}
        self._named = set(everywhere)
        if not new:
            return
        names = sorted(new)
        shown = "; ".join(f"{name}: {new[name][0]}" for name in names[:_NUM_SHOWN])
        more = f"; and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        if sent := [name for name in names if new[name][1]]:
            for name in sent:
                length = 2 * self._stays[name][0] if name in self._stays else NUM_STEPS_IN_BF16
                self._stays[name] = length, step + length
            self._send(sent, "bf16")
            action = (
                f"{len(sent)} compute in bf16 for {min(self._stays[name][0] for name in sent)} steps or more; "
                'engine.set_layer_precision(name, "fp8") undoes it'
            )
        else:
            action = 'To compute them in bf16: engine.set_layer_precision, or fp8.guard.action "bf16"'
        self._say(f"fp8: guard, step {step}: {len(names)} layers do not fit FP8 ({shown}{more}). {action}")

    def _end_stays(self, step: int) -> None:
        """Leave layers whose stay in bf16 is over to the schedule again. Collective where there are some."""
        over = sorted(name for name, (_, until) in self._stays.items() if 0 < until <= step)
        if not over:
            return
        for name in over:
            self._stays[name] = self._stays[name][0], 0
        self._send(over, "schedule")
        more = f" and {len(over) - _NUM_SHOWN} more" if len(over) > _NUM_SHOWN else ""
        self._say(f"fp8: guard, step {step}: {', '.join(over[:_NUM_SHOWN])}{more} may be in FP8 again")


def problems(layers: LayerStatistics) -> dict[str, str]:
    """Return layer -> which of its tensors passes which limit by how much; layers within the limits are missing."""
    found: dict[str, list[str]] = {}
    for name, kinds in layers.items():
        for kind, one in kinds.items():
            limits = [("saturation", one.saturation, SATURATION)]
            if kind != "grad_output":
                limits.append(("underflow", one.underflow, UNDERFLOW))
            for what, share, limit in limits:
                if share > limit:
                    found.setdefault(name, []).append(f"{what} of {kind} {share:.2g} above {limit:g}")
    return {name: ", ".join(lines) for name, lines in found.items()}
