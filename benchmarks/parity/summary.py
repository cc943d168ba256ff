"""Tables and verdicts of the parity studies: paired differences of the held-out loss, their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_ds.comparison import Stepwise, pair, pooled_half_widths, stepwise
from fp8_ds.curves import Curve
from fp8_ds.statistics import MEAN_BOUND, UPPER_BOUND, Paired
from parity.arms import ARMS, EXPLORED, OF_LINEARS, RECIPES, STATES, TRUNKS, VARIANTS
from parity.emulated import EMULATED

Rows = Sequence[dict[str, str]]
_LAST = tuple((arm, base) for arm, trunk in TRUNKS.items() for base in ("stock", trunk))
_VARIANTS = tuple((arm, base) for arm, other in (VARIANTS | EXPLORED).items() for base in ("stock", other))
_TO_STOCK = tuple((arm, "stock") for arm in ("fp8", *RECIPES, *STATES))
_PARTS = (*((arm, "stock") for arm in EMULATED), ("fp8", "emulated"))
_TO_FP8 = tuple((arm, "fp8") for arm in STATES)
_OF_LINEARS = (
    *((arm, base) for arm in OF_LINEARS for base in ("stock", "e4m11")),
    ("e4m11-fast-e4m3", "e4m11-fast"),
    ("e4m11-fast-e4m3", "e4m11-e4m3"),
    ("e4m11-e4m3-fast-input", "e4m11-fast-e4m3"),
)
PAIRS = {
    1: (*_TO_STOCK, ("torchao", "stock"), *_TO_FP8, *_LAST),
    2: (
        *_TO_STOCK,
        *_TO_FP8,
        ("e4m11-nearest", "fp8"),
        ("e4m11-nearest", "e4m11"),
        ("bf16-nearest", "stock"),
    ),
    3: (*_TO_STOCK, *_VARIANTS, *_OF_LINEARS, *_TO_FP8, *_LAST, *_PARTS),
}
"""(arm, what it is compared with), by regime."""
TITLES = {1: "from scratch", 2: "continued at 1e-5", 3: "branched off a trained model"}
BOUNDED = ("e4m19", "e4m11")
CONTROLS = (("e4m11-nearest", "e4m11"), ("bf16-nearest", "stock"))
LAST_SHARE = 0.1
NUM_LATE = 5
"""Evaluations at a run's end that are averaged beside the last one."""
_LOGGED = 10
"""Steps between two that are logged."""
_TRAINING_TEXT = (
    "Both runs of a pair see the same batches, so that what a batch adds to both cancels: ± is the standard error over "
    "the logged steps. FP8 arms have the rounding of their own forward in it, as in training."
)


@dataclass(frozen=True)
class Difference:
    """An arm to another, over the seeds that both have.

    Attributes:
        paired: relative differences in per cent, in the order of `seeds`.
        pooled: half width of the 95 % interval with the deviation pooled over all pairs of arms of the regime.
    """

    arm: str
    base: str
    seeds: tuple[int, ...]
    paired: Paired
    pooled: float

    @property
    def mean(self) -> float:
        return self.paired.mean

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of the mean by Student's t; infinite for one seed."""
        return self.paired.half_width

    @property
    def by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.paired.by_pair, strict=True))


def final_losses(rows: Rows, regime: int, steps: int) -> dict[str, dict[int, float]]:
    """Held-out loss after the last step by arm and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if int(row["regime"]) == regime and int(row["step"]) == steps and row["held_out_loss"]:
            found.setdefault(row["arm"], {})[int(row["seed"])] = float(row["held_out_loss"])
    return found


def differences(rows: Rows, regime: int, steps: int) -> list[Difference]:
    """After the last step, of all pairs of arms that share a seed."""
    losses = final_losses(rows, regime, steps)
    found: list[tuple[str, str, tuple[int, ...], Paired]] = []
    for arm, base in PAIRS[regime]:
        mine, theirs = losses.get(arm, {}), losses.get(base, {})
        seeds = tuple(sorted(mine.keys() & theirs.keys()))
        if seeds:
            found.append((arm, base, seeds, pair([mine[s] for s in seeds], [theirs[s] for s in seeds])))
    pooled = pooled_half_widths([paired for *_, paired in found])
    return [Difference(*one, half) for one, half in zip(found, pooled, strict=True)]


def verdicts(rows: Rows, steps: int, bounded: Sequence[str] = BOUNDED, regimes: Sequence[int] = (1, 2, 3)) -> list[str]:
    """The issue's bounds, each met, missed or not measured."""
    lines = []
    by_regime = {regime: {(d.arm, d.base): d for d in differences(rows, regime, steps)} for regime in regimes}
    for regime in regimes:
        for arm in bounded:
            d = by_regime[regime].get((arm, "stock"))
            if d is None or math.isinf(d.half_width):
                lines.append(f"NOT MEASURED: regime {regime}, {arm} against stock, two seeds or more")
                continue
            lines.append(
                f"{'met' if d.paired.verdict() == 'parity' else 'MISSED'}: regime {regime}, {arm} against stock: mean "
                f"{d.mean:+.3f} % (bound {MEAN_BOUND} %), upper end {d.mean + d.half_width:+.3f} % (bound "
                f"{UPPER_BOUND} %; with the pooled deviation {d.mean + d.pooled:+.3f} %)"
            )
    for arm, base in CONTROLS if 2 in regimes else ():
        d = by_regime[2].get((arm, base))
        if d is None or math.isinf(d.half_width):
            lines.append(f"NOT MEASURED: regime 2, {arm} against {base}, two seeds or more")
            continue
        if not any(d.paired.by_pair):
            lines.append(f"MISSED: regime 2, {arm} gives the losses of {base} to the last digit: is it another arm?")
            continue
        ok = d.mean - d.half_width > 0
        lines.append(
            f"{'met' if ok else 'MISSED'}: regime 2, {arm} is worse than {base}: mean {d.mean:+.3f} %, lower end "
            f"{d.mean - d.half_width:+.3f} % (bound 0)"
        )
    return lines


def report(rows: Rows, steps: int, bounded: Sequence[str] = BOUNDED, regimes: Sequence[int] = (1, 2, 3)) -> str:
    """Markdown: final losses, paired differences, verdicts."""
    lines = []
    for regime in regimes:
        losses = final_losses(rows, regime, steps)
        if losses:
            lines += [f"## Regime {regime}: {TITLES[regime]}", "", *_table(rows, regime, steps, losses), ""]
    return "\n".join([*lines, *(f"- {line}" for line in verdicts(rows, steps, bounded, regimes)), ""])


def report_in_bf16(rows: Rows, runs: Mapping[str, Mapping[str, Any]], steps: int, regimes: Sequence[int]) -> str:
    """Markdown: paired differences where every model's last evaluation computes in bf16, from its masters.

    Args:
        runs: by name, r1-fp8-s0; those of FP8 arms have "held_out_loss_bf16". Pairs without it are left out.
    """
    lines = []
    for regime in regimes:
        own: dict[tuple[str, int], Any] = {}
        for arm, by_seed in final_losses(rows, regime, steps).items():
            for seed, loss in by_seed.items():
                in_bf16 = None if _is_rounded(arm) else loss
                own[arm, seed] = runs.get(f"r{regime}-{arm}-s{seed}", {}).get("held_out_loss_bf16", in_bf16)
        evaluated = [{**row, "held_out_loss": own.get((row["arm"], int(row["seed"])))} for row in rows]
        known = [row for row in evaluated if int(row["regime"]) == regime and row["held_out_loss"] is not None]
        found = differences(known, regime, steps)  # type: ignore[arg-type]
        if any(_is_rounded(d.arm) for d in found):
            lines += [f"## Regime {regime}: the same models, evaluated in bf16", "", *_differences(found), ""]
    return "\n".join(lines)


def _is_rounded(arm: str) -> bool:
    """Whether its own evaluations are not bf16's."""
    return bool(ARMS[arm]) or arm in EMULATED


def by_step(rows: Rows, regime: int, column: str) -> dict[tuple[str, int], dict[int, float]]:
    """Losses of a column by step, of each arm and seed; those of cut runs too."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if int(row["regime"]) == regime and row[column]:
            found.setdefault((row["arm"], int(row["seed"])), {})[int(row["step"])] = float(row[column])
    return found


def pairs_in(runs: Collection[tuple[str, int]], regime: int) -> list[tuple[str, str, int]]:
    """(arm, base, seed) of all pairs of which both runs are there."""
    return [
        (arm, base, seed)
        for arm, base in PAIRS[regime]
        for seed in sorted(seed for name, seed in runs if name == arm and (base, seed) in runs)
    ]


def training_differences(rows: Rows, regime: int, steps: int) -> dict[tuple[str, str], dict[int, Stepwise]]:
    """Of all pairs of arms by seed, over a tenth of the steps."""
    curves = {
        run: Curve("", tuple(sorted(losses)), tuple(losses[step] for step in sorted(losses)))
        for run, losses in by_step(rows, regime, "train_loss").items()
    }
    found: dict[tuple[str, str], dict[int, Stepwise]] = {}
    for arm, base, seed in pairs_in(curves, regime):
        difference = stepwise(curves[arm, seed], curves[base, seed], LAST_SHARE * steps)
        if difference is not None:
            found.setdefault((arm, base), {})[seed] = difference
    return found


def report_training(rows: Rows, steps: int, regimes: Sequence[int]) -> str:
    """Markdown: `training_differences`."""
    lines = []
    for regime in regimes:
        found = training_differences(rows, regime, steps)
        if not found:
            continue
        lines += [f"## Regime {regime}: training loss in the last tenth of the steps", "", _TRAINING_TEXT, ""]
        lines += ["| difference | by seed, % | mean, % |", "|---|---|---|"]
        for (arm, base), by_seed in found.items():
            cells = ", ".join(
                f"{d.mean:+.3f} ± {d.error:.3f}" + f" (up to step {d.last_step})" * (d.last_step < steps - _LOGGED)
                for d in by_seed.values()
            )
            lines.append(f"| {arm} - {base} | {cells} | {statistics.fmean(d.mean for d in by_seed.values()):+.3f} |")
        lines.append("")
    return "\n".join(lines)


def late_differences(rows: Rows, regime: int) -> dict[tuple[str, str], dict[int, float]]:
    """Of all pairs of arms by seed, in %: the mean over the last `NUM_LATE` evaluations that both runs have."""
    curves = by_step(rows, regime, "held_out_loss")
    found: dict[tuple[str, str], dict[int, float]] = {}
    for arm, base, seed in pairs_in(curves, regime):
        mine, theirs = curves[arm, seed], curves[base, seed]
        late = sorted(mine.keys() & theirs.keys() - {0})[-NUM_LATE:]
        if len(late) == NUM_LATE:
            each = [100 * (mine[step] / theirs[step] - 1) for step in late]
            found.setdefault((arm, base), {})[seed] = statistics.fmean(each)
    return found


def report_late(rows: Rows, regimes: Sequence[int]) -> str:
    """Markdown: `late_differences`."""
    lines = []
    for regime in regimes:
        found = late_differences(rows, regime)
        if found:
            lines += [f"## Regime {regime}: held-out loss, mean of the last {NUM_LATE} evaluations", ""]
            lines += ["| difference | by seed, % | mean, % |", "|---|---|---|"]
        for (arm, base), by_seed in found.items():
            cells = ", ".join(f"{value:+.3f}" for value in by_seed.values())
            lines.append(f"| {arm} - {base} | {cells} | {statistics.fmean(by_seed.values()):+.3f} |")
        lines += [""] if found else []
    return "\n".join(lines)


def _table(rows: Rows, regime: int, steps: int, losses: dict[str, dict[int, float]]) -> list[str]:
    start = [r for r in rows if int(r["regime"]) == regime and r["step"] == "0" and r["arm"] == "stock"]
    seeds = sorted({seed for by_seed in losses.values() for seed in by_seed})
    first = f"; stock before the first step {start[0]['held_out_loss']}" if start else ""
    lines = [f"Held-out loss in nats per token{first}", ""]
    lines += [f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |", "|---" * (len(seeds) + 2) + "|"]
    for arm, by_seed in losses.items():
        cells = " | ".join(f"{by_seed[seed]:.4f}" if seed in by_seed else "" for seed in seeds)
        lines.append(f"| {arm} | {cells} | {statistics.fmean(by_seed.values()):.4f} |")
    stock = list(losses.get("stock", {}).values())
    if len(stock) > 1:
        noise = 100 * statistics.stdev(stock) / statistics.fmean(stock)
        lines += ["", f"Noise between stock's seeds: a deviation of {noise:.3f} % of the loss."]
    return [*lines, "", *_differences(differences(rows, regime, steps))]


def _differences(found: Sequence[Difference]) -> list[str]:
    lines = ["| paired difference | by seed, % | mean, % | 95 % interval, % | with pooled deviation, % |"]
    lines += ["|---|---|---|---|---|"]
    for d in found:
        cells = ", ".join(f"{value:+.3f}" for value in d.paired.by_pair)
        own, pooled = (f"{d.mean - half:+.3f} to {d.mean + half:+.3f}" for half in (d.half_width, d.pooled))
        lines.append(f"| {d.arm} - {d.base} | {cells} | {d.mean:+.3f} | {own} | {pooled} |")
    return lines
