"""Draws the chart of end_to_end_report.py: bars of tokens/s, whatever the length of the names beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLORS = {"stock": "#9aa5b1", "torch": "#9aa5b1", "torchao": "#e0a458", "ours": "#2a7f62"}
"""By system, the first word of an arm's name."""


@dataclass(frozen=True)
class Panel:
    """One run.

    Attributes:
        title: above it.
        speed: by arm, tokens/s a GPU.
        reference: the arm that ratios are to, which may be none of `speed`; then there are none.
    """

    title: str
    speed: Mapping[str, float]
    reference: str

    @property
    def names(self) -> dict[str, str]:
        """By arm, the slowest first: its name in lines."""
        return {arm: "\n".join(_lines(arm)) for arm in sorted(self.speed, key=self.speed.__getitem__)}

    @property
    def height(self) -> float:
        """Inches. Bars are equally high, as high as the longest name beside them."""
        return 0.8 + len(self.speed) * (0.2 + 0.15 * max(len(_lines(arm)) for arm in self.speed))


def _lines(arm: str, width: int = 56) -> list[str]:
    """An arm's name in lines of so many characters or fewer, broken before its options; a longer option is a line."""
    broken = textwrap.wrap(arm.replace("+", " +"), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(" +", "+") for line in broken]


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """The PNG at `path`, a panel below the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [panel.height for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(11, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        reference = panel.speed.get(panel.reference)
        values = [panel.speed[arm] for arm in panel.names]
        bars = axis.barh(list(panel.names.values()), values, color=[COLORS[arm.split("-")[0]] for arm in panel.names])
        ratios = [f"{value:,.0f}" + (f"  ({value / reference:.2f}x)" if reference else "") for value in values]
        axis.bar_label(bars, ratios, padding=3, fontsize=8)
        axis.margins(x=0.2)
        axis.set_title(panel.title + (f" (x {panel.reference})" if reference else ""), fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
