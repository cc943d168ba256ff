"""Heat maps of the FP8 layers over a run, from the JSON lines of `"fp8": {"monitor": {"sink": "runs/health.jsonl"}}`.

    python examples/deepspeed/heatmap.py runs/health.jsonl health.png --statistic underflow

One each for inputs, weights and output gradients, layers downwards and steps to the right. Red is a tensor that had an
infinity or NaN, white a layer that was in bf16. Of a resumed run, which repeats steps, the last report of each counts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

KINDS = ("input", "weight", "grad_output")
STATISTICS = ("underflow", "saturation", "amax", "scale")


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The reports of a file, by step."""
    reports = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            report = json.loads(line)
            reports[report["step"]] = {"step": report["step"], "layers": report["layers"]}
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f'{path}:{number}: expected a report of "fp8": {{"monitor": ...}}, got {line[:60]!r}. Give that file; '
                "a run that was killed may have left half a line: delete it."
            ) from error
    if not any(report["layers"] for report in reports.values()):
        raise SystemExit(
            f"{path}: expected reports of FP8 layers, got none. Train for monitor.every steps and one more."
        )
    return [reports[step] for step in sorted(reports)]


def draw(reports: list[dict[str, Any]], statistic: str) -> Figure:
    names = list(dict.fromkeys(name for report in reports for name in report["layers"]))
    figure = Figure(figsize=(15, max(2.5, 0.16 * len(names) + 1.5)), layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        found = [[report["layers"].get(name, {}).get(kind, {}) for report in reports] for name in names]
        rows = [[math.nan if one.get(statistic) is None else one[statistic] for one in row] for row in found]
        positive = [value for row in rows for value in row if value > 0]
        norm = LogNorm(min(positive), max(positive)) if statistic in ("amax", "scale") and positive else None
        image = axis.imshow(rows, aspect="auto", interpolation="nearest", norm=norm)
        bad = [[1.0 if one and one["amax"] is None else math.nan for one in row] for row in found]
        axis.imshow(bad, aspect="auto", interpolation="nearest", cmap=ListedColormap(["red"]))
        ticks = sorted({0, len(reports) // 2, len(reports) - 1})
        axis.set_xticks(ticks, [str(reports[tick]["step"]) for tick in ticks])
        axis.set(title=f"{kind}: {statistic}", xlabel="step", yticks=range(len(names)))
        axis.set_yticklabels(names, fontsize=6)
        figure.colorbar(image, ax=axis)
    legend = {"had an infinity or NaN": "red", "in bf16, or not known": "white"}
    patches = [Patch(facecolor=color, edgecolor="black", label=text) for text, color in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, help='JSON lines that "monitor": {"sink": PATH} has written')
    parser.add_argument("out", type=Path, help="the picture to write")
    parser.add_argument("--statistic", choices=STATISTICS, default="underflow")
    args = parser.parse_args()
    draw(read_reports(args.reports), args.statistic).savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
