"""The plots of numerics.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def plot_moments(spread: list[Row], stalls: dict[str, list[Row]], storage: Iterable[str], path: Path) -> None:
    """Update error by spread, and v after gradients shrank; `storage` names the curves of the latter."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4.2))
    x_name = "sigma of ln(scale) within a group"
    for beta2, style in ((0.95, "-"), (0.999, "--")):
        for name, color in (("ours", "tab:blue"), ("sqrt(v) E4M3", "tab:orange"), ("COAT", "tab:green")):
            values = [row[f"{name}, beta2 {beta2}"] for row in spread]
            axes[0].plot([row[x_name] for row in spread], values, style, color=color, label=f"{name}, β2 {beta2}")
    axes[0].set(
        xlabel="standard deviation of ln(scale) within a group of 128",
        ylabel="relative L2 error of the update",
        ylim=(0, 0.5),
    )
    axes[0].set_title("Update after 300 steps")
    for axis, (title, curve) in zip(axes[1:], stalls.items(), strict=True):
        x = [row["step after the drop"] for row in curve]
        for name in storage:
            axis.plot(x, [row[name] for row in curve], "-" if name.startswith("ours") else "--", label=name)
        low, high = ([row[f"ours, {p} percentile"] for row in curve] for p in ("1st", "99th"))
        axis.fill_between(x, low, high, alpha=0.2, color="tab:blue", linewidth=0)
        axis.set(yscale="log", xlabel="steps after gradients shrank tenfold", ylabel="stored √v / exact √v (median)")
        axis.set_title(title)
        # One tick a doubling, in plain numbers: log axes of less than two decades label theirs at random.
        axis.set_yticks([0.5, 1, 2, 4, 8], [f"{tick:g}" for tick in (0.5, 1, 2, 4, 8)])
        axis.minorticks_off()
    for axis in axes:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_masters(table: list[Row], masters: Iterable[str], path: Path) -> None:
    """Mean way and its error by the size of updates; `masters` names the curves."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    shown = [row for row in table if row["weights"] == "N(0, 0.02)"]
    for name in masters:
        rows = [row for row in shown if row["master"] == name]
        style = "--" if "nearest" in name or "MS-AMP" in name else "-"
        for axis, key in zip(axes, ("mean", "error"), strict=True):
            axis.plot([row["lr"] for row in rows], [row[key] for row in rows], style, marker=".", label=name)
    axes[0].set(ylabel="mean way / float32's way", title="100 steps of one sign, weights N(0, 0.02)", ylim=(-0.05, 1.6))
    axes[1].set(ylabel="relative L2 error of the way", yscale="log", title="Error of single weights")
    for axis in axes:
        axis.set(xscale="log", xlabel="lr |update|")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
