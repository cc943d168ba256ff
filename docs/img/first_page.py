"""Draws docs/img/first-page.png: README's table of fp8_ds beside its peers, tokens/s and memory.

    python docs/img/first_page.py

The numbers are read from the result file; a test compares README's table with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("first-page.png")
RESULT = ROOT / "benchmarks/results/2026-11-23-end-to-end.json"
RUN = "fastest", "2026-11-23T17:27:14Z"
"""Piece and id."""
REFERENCE = "stock-eager"
NAMES = {
    REFERENCE: "DeepSpeed ZeRO-2, bf16",
    "torchao-tensorwise-adamwfp8-compiled": "torchao, compiled, AdamWFp8",
    "ours-e4m11-compiled+fused+attention.backend=fa3+cudagraphs": "fp8_ds, ZeRO-2, FP8 states",
    "ours-e4m11-compiled+fused+delayed+attention.backend=fa3+cudagraphs": "with delayed scales",
}
OURS, PEERS = "#2a7f62", "#9aa5b1"


@dataclass(frozen=True)
class Row:
    """One arm of the run; means where it was measured twice.

    Attributes:
        name: as README has it.
        is_ours: or a peer's.
        tokens: per second and GPU.
        ratio: of tokens to DeepSpeed's.
        gib: of memory reserved at the peak, in all rows alike: what CUDA graphs keep is not counted as allocated.
    """

    name: str
    is_ours: bool
    tokens: float
    ratio: float
    gib: float


def rows() -> list[Row]:
    """In README's order."""
    (run,) = (run for run in json.loads(RESULT.read_text())["runs"] if (run["piece"], run["id"]) == RUN)

    def mean(arm: str, key: str) -> float:
        return fmean(result[key] for result in run["results"] if result["arm"] == arm)

    stock = mean(REFERENCE, "tokens_per_second_per_gpu")
    found = []
    for arm, name in NAMES.items():
        tokens, gib = mean(arm, "tokens_per_second_per_gpu"), mean(arm, "peak_reserved_gib")
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
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 2.9), sharey=True, width_ratios=(3, 2), layout="constrained")
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
