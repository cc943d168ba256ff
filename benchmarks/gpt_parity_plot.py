"""Statistics and pictures of gpt_parity.py: paired differences of the held-out loss, their 95 % intervals, verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8_ds.statistics import MEAN_BOUND, UPPER_BOUND, half_width, t_quantile

Rows = Sequence[dict[str, str]]
PAIRS = {
    1: (
        ("fp8", "stock"),
        ("e4m19", "stock"),
        ("e4m11", "stock"),
        ("torchao", "stock"),
        ("e4m19", "fp8"),
        ("e4m11", "fp8"),
        ("fp8-bf16-last", "stock"),
        ("fp8-bf16-last", "fp8"),
        ("e4m11-bf16-last", "stock"),
        ("e4m11-bf16-last", "e4m11"),
    ),
    2: (
        ("fp8", "stock"),
        ("e4m19", "fp8"),
        ("e4m11", "fp8"),
        ("e4m19", "stock"),
        ("e4m11", "stock"),
        ("e4m11-nearest", "fp8"),
        ("e4m11-nearest", "e4m11"),
        ("bf16-nearest", "stock"),
    ),
}
"""(arm, what it is compared with), by regime."""
PAIRS[3] = tuple((arm, base) for arm, base in PAIRS[1] if arm != "torchao")
TITLES = {1: "from scratch", 2: "continued at 1e-5", 3: "branched off a trained model"}
BOUNDED = ("e4m19", "e4m11")
CONTROLS = (("e4m11-nearest", "e4m11"), ("bf16-nearest", "stock"))
COLORS = {
    "stock": "black",
    "fp8": "tab:blue",
    "e4m19": "tab:green",
    "e4m11": "tab:orange",
    "torchao": "tab:purple",
    "e4m11-nearest": "tab:red",
    "bf16-nearest": "tab:brown",
    "fp8-bf16-last": "tab:cyan",
    "e4m11-bf16-last": "tab:olive",
}


@dataclass(frozen=True)
class Difference:
    """Relative differences in per cent, one per seed, of an arm to another.

    Attributes:
        half_width: of the 95 % interval of the mean by Student's t; infinite for one seed.
        pooled: the same with the deviation pooled over all arms of the regime.
    """

    arm: str
    base: str
    by_seed: dict[int, float]
    half_width: float
    pooled: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())


def final_losses(rows: Rows, regime: int, steps: int) -> dict[str, dict[int, float]]:
    """Held-out loss after the last step by arm and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if int(row["regime"]) == regime and int(row["step"]) == steps and row["held_out_loss"]:
            found.setdefault(row["arm"], {})[int(row["seed"])] = float(row["held_out_loss"])
    return found


def differences(rows: Rows, regime: int, steps: int) -> list[Difference]:
    """Of all pairs of arms that share a seed."""
    losses = final_losses(rows, regime, steps)
    relative: dict[tuple[str, str], dict[int, float]] = {}
    for arm, base in PAIRS[regime]:
        mine, theirs = losses.get(arm, {}), losses.get(base, {})
        common = {seed: 100 * (mine[seed] / theirs[seed] - 1) for seed in sorted(mine.keys() & theirs.keys())}
        if common:
            relative[arm, base] = common
    spreads = [(statistics.variance(d.values()), len(d) - 1) for d in relative.values() if len(d) > 1]
    degrees = sum(n for _, n in spreads)
    pooled = math.sqrt(sum(variance * n for variance, n in spreads) / degrees) if degrees else math.inf
    result = []
    for (arm, base), by_seed in relative.items():
        root = math.sqrt(len(by_seed))
        own = half_width(tuple(by_seed.values()))
        result.append(Difference(arm, base, by_seed, own, t_quantile(degrees) * pooled / root))
    return result


def verdicts(rows: Rows, steps: int) -> list[str]:
    """The issue's bounds, each met, missed or not measured."""
    lines = []
    by_regime = {regime: {(d.arm, d.base): d for d in differences(rows, regime, steps)} for regime in TITLES}
    for regime in TITLES:
        for arm in BOUNDED:
            d = by_regime[regime].get((arm, "stock"))
            if d is None or math.isinf(d.half_width):
                lines.append(f"NOT MEASURED: regime {regime}, {arm} against stock, two seeds or more")
                continue
            upper = d.mean + d.half_width
            ok = d.mean <= MEAN_BOUND and upper <= UPPER_BOUND
            lines.append(
                f"{'met' if ok else 'MISSED'}: regime {regime}, {arm} against stock: mean {d.mean:+.3f} % (bound "
                f"{MEAN_BOUND} %), upper end {upper:+.3f} % (bound {UPPER_BOUND} %; with the pooled deviation "
                f"{d.mean + d.pooled:+.3f} %)"
            )
    for arm, base in CONTROLS:
        d = by_regime[2].get((arm, base))
        if d is None or math.isinf(d.half_width):
            lines.append(f"NOT MEASURED: regime 2, {arm} against {base}, two seeds or more")
            continue
        if not any(d.by_seed.values()):
            lines.append(f"MISSED: regime 2, {arm} gives the losses of {base} to the last digit: is it another arm?")
            continue
        ok = d.mean - d.half_width > 0
        lines.append(
            f"{'met' if ok else 'MISSED'}: regime 2, {arm} is worse than {base}: mean {d.mean:+.3f} %, lower end "
            f"{d.mean - d.half_width:+.3f} % (bound 0)"
        )
    return lines


def report(rows: Rows, steps: int) -> str:
    """Markdown: final losses, paired differences, verdicts."""
    lines = []
    for regime, title in TITLES.items():
        losses = final_losses(rows, regime, steps)
        if not losses:
            continue
        start = [r for r in rows if int(r["regime"]) == regime and r["step"] == "0" and r["arm"] == "stock"]
        seeds = sorted({seed for by_seed in losses.values() for seed in by_seed})
        lines += [f"## Regime {regime}: {title}", ""]
        lines += [f"Held-out loss in nats per token; stock before the first step {start[0]['held_out_loss']}", ""][
            : 2 * bool(start)
        ]
        lines += [f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |", "|---" * (len(seeds) + 2) + "|"]
        for arm, by_seed in losses.items():
            cells = " | ".join(f"{by_seed[seed]:.4f}" if seed in by_seed else "" for seed in seeds)
            lines.append(f"| {arm} | {cells} | {statistics.fmean(by_seed.values()):.4f} |")
        lines += ["", "| paired difference | by seed, % | mean, % | 95 % interval, % | with pooled deviation, % |"]
        lines += ["|---|---|---|---|---|"]
        for d in differences(rows, regime, steps):
            cells = ", ".join(f"{value:+.3f}" for value in d.by_seed.values())
            lines.append(
                f"| {d.arm} - {d.base} | {cells} | {d.mean:+.3f} | {d.mean - d.half_width:+.3f} to "
                f"{d.mean + d.half_width:+.3f} | {d.mean - d.pooled:+.3f} to {d.mean + d.pooled:+.3f} |"
            )
        lines.append("")
    return "\n".join([*lines, *(f"- {line}" for line in verdicts(rows, steps)), ""])


def plot(rows: Rows, steps: int, path: Path) -> None:
    """Curves of all regimes above, mean paired differences with their intervals below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(19, 9))
    for column, regime in enumerate(TITLES):
        _curves(axes[0][column], [row for row in rows if int(row["regime"]) == regime], regime)
        found = [d for d in differences(rows, regime, steps) if len(d.by_seed) > 1]
        for y, d in enumerate(found):
            axes[1][column].errorbar(d.mean, y, xerr=d.half_width, fmt="o", color=COLORS[d.arm], capsize=3)
            axes[1][column].plot(list(d.by_seed.values()), [y] * len(d.by_seed), "|", color=COLORS[d.arm])
        axes[1][column].set_yticks(range(len(found)), [f"{d.arm} - {d.base}" for d in found])
        axes[1][column].axvline(0, color="gray", linewidth=0.8)
        if regime != 2:
            axes[1][column].axvline(UPPER_BOUND, color="gray", linestyle=":", label="bound of the upper end")
            axes[1][column].legend(fontsize=8)
        axes[1][column].set(xlabel="paired difference of the held-out loss, %: seeds, mean, 95 % interval")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis, rows: Rows, regime: int) -> None:  # type: ignore[no-untyped-def]
    labelled: set[str] = set()
    for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in rows):
        points = [row for row in rows if row["arm"] == arm and row["seed"] == seed and row["held_out_loss"]]
        x, y = [int(row["tokens"]) / 1e6 for row in points], [float(row["held_out_loss"]) for row in points]
        skip = regime == 1  # the loss of random weights would flatten all that follows
        axis.plot(x[skip:], y[skip:], color=COLORS[arm], linewidth=0.9, label=None if arm in labelled else arm)
        labelled.add(arm)
    axis.set(
        xlabel="million tokens", ylabel="held-out loss, nats per token", title=f"Regime {regime}: {TITLES[regime]}"
    )
    if labelled:
        axis.legend(fontsize=8)
