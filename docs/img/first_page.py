"""Draws docs/img/first-page.png: README's table of fp8_ds beside its peers, tokens/s and memory.

    python docs/img/first_page.py

The numbers are read from the result files; a test compares README's table with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("first-page.png")
REFERENCE = "stock-eager"
FASTEST = ("2026-11-27-end-to-end", "2026-11-27T18:45:40Z")
PRECISE = ("2026-11-26-end-to-end", "2026-11-26T05:07:04Z")
TENSORWISE = ("2026-11-23-end-to-end", "2026-11-23T17:27:14Z")
"""Result file and id of a run. Ratios are to the reference of the same run; `FASTEST`'s is the one that is shown."""
ARMS = (
    (FASTEST, REFERENCE, "DeepSpeed ZeRO-2, bf16"),
    (FASTEST, "torchao-tensorwise-adamwfp8-compiled", "torchao, compiled, AdamWFp8"),
    (PRECISE, "ours-e4m11-compiled+fused+precise+cudagraphs", "fp8_ds, first and last layer in bf16"),
    (TENSORWISE, "ours-e4m11-compiled+fused+attention.backend=fa3+cudagraphs", "fp8_ds, all layers in FP8"),
    (
        FASTEST,
        "ours-e4m11-compiled+delayed+fused+e4m3+linear.fast_accumulation=output_and_grad_input+attention.backend=fa3",
        "the fastest: delayed scales, E4M3 gradients",
    ),
)
"""Run, arm, and name in README."""
OURS, PEERS = "#2a7f62", "#9aa5b1"


@dataclass(frozen=True)
class Row:
    """One arm of a run; means where it was measured twice.

    Attributes:
        name: as README has it.
        is_ours: or a peer's.
        tokens: per second and GPU.
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

    found = []
    for run, arm, name in ARMS:
        tokens, gib = mean(run, arm, "tokens_per_second_per_gpu"), mean(run, arm, "peak_reserved_gib")
        stock = mean(run, REFERENCE, "tokens_per_second_per_gpu")
        found.append(Row(name, arm.startswith("ours"), tokens, tokens / stock, gib))
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
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.3), sharey=True, width_ratios=(3, 2), layout="constrained")
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
