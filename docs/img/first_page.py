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
RUN = ("2026-12-01-training", "2026-11-28T14:08:57Z")
"""Result file and id of the run that all rows are of."""
ARMS = {
    REFERENCE: "DeepSpeed ZeRO-2, bf16",
    "torchao": "torchao, compiled, AdamWFp8, FlashAttention-3",
    "headline+schedule.bf16_last_fraction=0.0": "fp8_ds, delayed scales",
}
"""Arms, and their names in README."""
OURS, PEERS = "#2a7f62", "#9aa5b1"


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: as README has it.
        is_ours: or a peer's.
        tokens: per second and GPU.
        ratio: of tokens to DeepSpeed's.
        gib: of memory reserved at the peak.
        loss: training loss of the last tenth of the steps, in per cent above DeepSpeed's.
    """

    name: str
    is_ours: bool
    tokens: float
    ratio: float
    gib: float
    loss: float


def rows() -> list[Row]:
    """In README's order."""
    runs = json.loads((ROOT / f"benchmarks/results/{RUN[0]}.json").read_text())["runs"]
    (results,) = (run["results"] for run in runs if run["id"] == RUN[1])
    of_arm = {result["arm"]: result for result in results}

    def late(result: dict[str, Any]) -> float:
        num = max(1, len(result["losses"]) // 10)
        return fmean(result["losses"][-num:])

    base = of_arm[REFERENCE]
    speed = "tokens_per_second_per_gpu"
    return [
        Row(
            name,
            name.startswith("fp8_ds"),
            of_arm[arm][speed],
            of_arm[arm][speed] / base[speed],
            of_arm[arm]["peak_reserved_gib"],
            100 * (late(of_arm[arm]) / late(base) - 1),
        )
        for arm, name in ARMS.items()
    ]


def draw(path: Path) -> None:
    """The picture, at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = rows()[::-1]
    names, colours = [row.name for row in shown], [OURS if row.is_ours else PEERS for row in shown]
    speed = [row.tokens / 1e3 for row in shown], [f"{row.tokens / 1e3:.1f}k  ({row.ratio:.2f}x)" for row in shown]
    memory = [row.gib for row in shown], [f"{row.gib:.1f}" for row in shown]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 2.6), sharey=True, width_ratios=(3, 2), layout="constrained")
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
