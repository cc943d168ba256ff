"""The picture of a parity study: held-out losses, how far training losses are from stock's, paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8_ds.statistics import MEAN_BOUND, UPPER_BOUND
from parity.arms import ARMS
from parity.summary import TITLES, Rows, by_step, differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_MEANS = 20
"""Points of a curve of training losses, each the mean over as many steps."""
_OUTSIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "fontsize": 8}


def plot(rows: Rows, steps: int, path: Path, regimes: Sequence[int] = (1, 2, 3)) -> None:
    """A column for each regime that has runs: curves above, training losses against stock's, differences below.

    Args:
        steps: of a run.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    regimes = [regime for regime in regimes if any(int(row["regime"]) == regime for row in rows)] or regimes
    colors = _colors(rows)
    figure = pyplot.figure(figsize=(10 * len(regimes), 13), layout="constrained")
    # Figures of their own: the long names beside the last panel would take the others their width.
    panels = figure.subfigures(3, len(regimes), squeeze=False, height_ratios=(4, 4, 5))
    for column, regime in enumerate(regimes):
        curves, training, paired = (panel.subplots() for panel in panels[:, column])
        _curves(curves, [row for row in rows if int(row["regime"]) == regime], regime, colors)
        _training(training, rows, regime, steps, colors)
        _differences(paired, rows, regime, steps, colors)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _colors(rows: Rows) -> dict[str, Any]:
    """By arm: stock is black, each other one that has runs another of twenty colors."""
    from matplotlib import colormaps

    own = {row["arm"] for row in rows} - {"stock"}
    named = {arm: colormaps["tab20"](k % 20) for k, arm in enumerate(arm for arm in ARMS if arm in own)}
    return {"stock": "black", **named}


def _curves(axis: Axes, rows: Rows, regime: int, colors: dict[str, Any]) -> None:
    labelled: set[str] = set()
    for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in rows):
        points = [row for row in rows if row["arm"] == arm and row["seed"] == seed and row["held_out_loss"]]
        x, y = [int(row["tokens"]) / 1e6 for row in points], [float(row["held_out_loss"]) for row in points]
        skip = regime == 1  # the loss of random weights would flatten all that follows
        axis.plot(x[skip:], y[skip:], color=colors[arm], linewidth=0.9, label=None if arm in labelled else arm)
        labelled.add(arm)
    axis.set(
        xlabel="million tokens", ylabel="held-out loss, nats per token", title=f"Regime {regime}: {TITLES[regime]}"
    )
    if labelled:
        axis.legend(**_OUTSIDE)


def training_curves(rows: Rows, regime: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """By arm, [(million tokens, training loss against stock's in %)]: means over a part of the steps, and over seeds.

    A seed counts for as far as both its runs have come; an arm ends where its first seed does.
    """
    losses = by_step(rows, regime, "train_loss")
    tokens = {int(row["step"]): int(row["tokens"]) / 1e6 for row in rows if int(row["regime"]) == regime}
    found: dict[str, list[tuple[float, float]]] = {}
    for arm in dict.fromkeys(arm for arm, _ in losses if arm != "stock"):
        seeds = [seed for name, seed in losses if name == arm and ("stock", seed) in losses]
        common = set.intersection(*(losses[arm, s].keys() & losses["stock", s].keys() for s in seeds)) if seeds else ()
        parts: dict[int, list[int]] = {}
        for step in sorted(common):
            parts.setdefault((step - 1) * _NUM_MEANS // steps, []).append(step)
        found[arm] = [
            (
                statistics.fmean(tokens[step] for step in part),
                statistics.fmean(
                    100 * (losses[arm, s][step] / losses["stock", s][step] - 1) for s in seeds for step in part
                ),
            )
            for part in parts.values()
        ]
    return {arm: points for arm, points in found.items() if points}


def _training(axis: Axes, rows: Rows, regime: int, steps: int, colors: dict[str, Any]) -> None:
    for arm, points in training_curves(rows, regime, steps).items():
        axis.plot(*zip(*points, strict=True), color=colors[arm], linewidth=1.2)
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.set(xlabel="million tokens", ylabel="training loss against stock's, %: mean over seeds")


def _differences(axis: Axes, rows: Rows, regime: int, steps: int, colors: dict[str, Any]) -> None:
    found = differences(rows, regime, steps)
    for y, d in enumerate(found):
        if len(d.seeds) > 1:
            axis.errorbar(d.mean, y, xerr=d.half_width, fmt="o", color=colors[d.arm], capsize=3)
        axis.plot(d.paired.by_pair, [y] * len(d.seeds), "|", color=colors[d.arm])
    axis.set_yticks(range(len(found)), [f"{d.arm} - {d.base}" for d in found])
    axis.axvline(0, color="gray", linewidth=0.8)
    if regime != 2:
        axis.axvline(MEAN_BOUND, color="gray", linestyle="--", label="bound of the mean")
        axis.axvline(UPPER_BOUND, color="gray", linestyle=":", label="bound of the upper end")
        axis.legend(**_OUTSIDE)
    axis.set(xlabel="paired difference of the held-out loss, %: seeds, mean, 95 % interval")
