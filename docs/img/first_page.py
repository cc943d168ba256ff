"""Draws docs/img/first-page.png: README's table of fp8_ds beside its peers, tokens/s and memory.

    python docs/img/first_page.py

The numbers are read from the result files; a test compares README's table with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("first-page.png")
REFERENCE = "stock-eager"
LAST_STEPS = ("2026-11-28-end-to-end", "2026-11-28T07:03:06Z")
DELAYED = ("2026-11-28-end-to-end", "2026-11-28T07:08:41Z")
PRECISE = ("2026-11-26-end-to-end", "2026-11-26T05:07:04Z")
TENSORWISE = ("2026-11-23-end-to-end", "2026-11-23T17:27:14Z")
"""Result file and id of a run. Ratios are to the reference of the same run; `LAST_STEPS`'s is the one that is shown."""
ARMS: tuple[tuple[tuple[str, str], dict[str, float], str], ...] = (
    (LAST_STEPS, {REFERENCE: 1}, "DeepSpeed ZeRO-2, bf16"),
    (DELAYED, {"torchao-tensorwise-adamwfp8-compiled": 1}, "torchao, compiled, AdamWFp8"),
    (
        TENSORWISE,
        {"ours-e4m11-compiled+fused+attention.backend=fa3+cudagraphs": 1},
        "fp8_ds, one current scale a tensor",
    ),
    (PRECISE, {"ours-e4m11-compiled+fused+precise+cudagraphs": 1}, "fp8_ds, the first and last layer in bf16"),
)
"""Run, arms with the share of a run's steps that each computes, and name in README."""
OURS, PEERS = "#2a7f62", "#9aa5b1"


@dataclass(frozen=True)
class Row:
    """One setting; means where it was measured twice.

    Attributes:
        name: as README has it.
        is_ours: or a peer's.
        tokens: per second and GPU, in the mean of a run whose steps are not all alike.
        ratio: of tokens to DeepSpeed's in the same run.
        gib: of memory reserved at the peak, in all rows alike: what CUDA graphs keep is not counted as allocated.
    """

    name: str
    is_ours: bool
    tokens: float
    ratio: float
    gib: float


def results(run: tuple[str, str]) -> list[dict[str, Any]]:
    """Of the arms of a run, in the order in which they were measured."""
    name, wanted = run
    runs = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["runs"]
    (found,) = (each["results"] for each in runs if each["id"] == wanted)
    return list(found)


def rows() -> list[Row]:
    """In README's order."""

    def mean(run: tuple[str, str], arm: str, key: str) -> float:
        return fmean(result[key] for result in results(run) if result["arm"] == arm)

    def tokens(run: tuple[str, str], shares: Mapping[str, float]) -> float:
        """Of so many steps of each arm by the time that all of them take."""
        return 1 / sum(share / mean(run, arm, "tokens_per_second_per_gpu") for arm, share in shares.items())

    found = []
    for run, shares, name in ARMS:
        ratio = tokens(run, shares) / tokens(run, {REFERENCE: 1})
        gib = max(mean(run, arm, "peak_reserved_gib") for arm in shares)
        found.append(Row(name, any(arm.startswith("ours") for arm in shares), tokens(run, shares), ratio, gib))
    return found


def draw(path: Path) -> None:
    """The picture, at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = rows()[::-1]
    names, colours = [row.name for row in shown], [OURS if row.is_ours else PEERS for row in shown]
    speed = [row.tokens / 1e3 for row in shown], [f"{row.tokens / 1e3:.1f}k  ({row.ratio:.2f}x)" for row in shown]
    memory = [row.gib for row in shown], [f"{row.gib:.1f}" for row in shown]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True, width_ratios=(3, 2), layout="constrained")
    titles = ("thousand tokens/s (more is better)", "GiB reserved at the peak (less is better)")
    for axis, (values, labels), title in zip(axes, (speed, memory), titles, strict=True):
        axis.bar_label(axis.barh(names, values, color=colours), labels, padding=3, fontsize=9)
        axis.margins(x=0.25)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
