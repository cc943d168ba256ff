"""Heat maps of the layers over time, from the JSON lines that the monitor wrote.

    fp8-ds heatmap health.jsonl health.png [--statistic underflow]
    python -m fp8_ds.monitor.plot health.jsonl health.png [--statistic underflow]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8_ds import json_text
from fp8_ds.curves import last_attempt
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.statistics import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATISTICS = ("underflow", "saturation", "amax", "scale", "scale_age")
_LOGARITHMIC = ("amax", "scale")
_NOT_FINITE = "red"
"""Of no value in viridis."""


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The reports of a file, by step; of a resumed run, which repeats steps, those of the last attempt.

    Raises:
        ConfigError: a line is no report, or there is none.
        OSError: the file cannot be read.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            report = json_text.parse(line.decode("utf-8-sig"))
            _check_layers(report["layers"])
            found.append((int(report["step"]), report))
        except (ValueError, KeyError, TypeError, OverflowError) as error:  # a step may be 1e400
            raise ConfigError(
                f'{path}:{number}: expected a report of "fp8": {{"monitor": ...}}, got {line[:60]!r}. Give that file; '
                "a run that was killed may have left half a line."
            ) from error
    reports = last_attempt(found)
    if not reports:
        raise ConfigError(
            f"{path}: expected at least one report, got none. Train for monitor.every steps and one more."
        )
    if not any(report["layers"] for report in reports.values()):
        raise ConfigError(
            f"{path}: expected FP8 layers in its reports, got none. Give the file of a run that has some."
        )
    return [reports[step] for step in sorted(reports)]


def _check_layers(layers: Any) -> None:
    """Raises: TypeError: they are not what `Report.to_json` writes."""
    for name, kinds in _entries(layers, "layers").items():
        for kind, one in _entries(kinds, name).items():
            for key, value in _entries(one, kind).items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    raise TypeError(key)


def _entries(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(name)
    return value


def matrix(reports: list[dict[str, Any]], kind: str, statistic: str) -> tuple[list[str], list[list[float]]]:
    """Names of the layers, and a row for each with a number per report; NaN where it was in bf16 or is not known."""
    names = list(dict.fromkeys(name for report in reports for name in report["layers"]))
    rows = []
    for name in names:
        found = [report["layers"].get(name, {}).get(kind, {}).get(statistic) for report in reports]
        rows.append([math.nan if value is None else float(value) for value in found])
    return names, rows


def not_finite(reports: list[dict[str, Any]], kind: str) -> list[list[bool]]:
    """As `matrix`: where the tensor had an infinity or NaN, whatever its statistics say."""
    names = matrix(reports, kind, "amax")[0]
    found = [[report["layers"].get(name, {}).get(kind) for report in reports] for name in names]
    return [[one is not None and one.get("amax") is None for one in row] for row in found]


def plot(reports: list[dict[str, Any]], statistic: str, out: Path) -> None:
    """A PNG of `draw`.

    Raises:
        ConfigError: as `draw`, or `out` has another suffix.
        OSError: it cannot be written.
    """
    if out.suffix.lower() != ".png":
        raise ConfigError(f"out: expected a file that ends in .png, got {out}. Name one.")
    draw(reports, statistic).savefig(out, dpi=120, format="png")


def draw(reports: list[dict[str, Any]], statistic: str) -> Figure:
    """One heat map for inputs, weights and output gradients; layers downwards, steps to the right.

    Raises:
        ConfigError: matplotlib is missing, or the statistic is none.
    """
    if statistic not in STATISTICS:
        raise ConfigError(f"statistic: expected one of {', '.join(STATISTICS)}, got {statistic}. Use one of these.")
    try:
        from matplotlib.colors import ListedColormap, LogNorm
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError("matplotlib: expected the package, got none. Run: pip install matplotlib") from error
    tables = [matrix(reports, kind, statistic) for kind in KINDS]
    names = tables[0][0]
    figure = Figure(figsize=(15, max(2.5, 0.16 * len(names) + 1.5)), layout="constrained")
    axes = figure.subplots(1, len(KINDS), sharey=True)
    steps = [report["step"] for report in reports]
    for axis, kind, (_, rows) in zip(axes, KINDS, tables, strict=True):
        values = [value for row in rows for value in row if value > 0 and math.isfinite(value)]
        norm = LogNorm(min(values), max(values)) if statistic in _LOGARITHMIC and values else None
        image = axis.imshow(rows, aspect="auto", interpolation="nearest", norm=norm)
        ticks = sorted({0, len(steps) // 2, len(steps) - 1})
        axis.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
        axis.set_title(f"{kind}: {statistic}")
        axis.set_xlabel("step")
        figure.colorbar(image, ax=axis)
        marks = [[1.0 if is_bad else math.nan for is_bad in row] for row in not_finite(reports, kind)]
        axis.imshow(marks, aspect="auto", interpolation="nearest", cmap=ListedColormap([_NOT_FINITE]))
    axes[0].set_yticks(range(len(names)), names, fontsize=6)
    legend = {"had an infinity or NaN": _NOT_FINITE, "in bf16, or not known": "white"}
    patches = [Patch(facecolor=color, edgecolor="black", label=text) for text, color in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fp8_ds.monitor.plot", description=__doc__)
    parser.add_argument("reports", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--statistic", choices=STATISTICS, default="underflow")
    options = parser.parse_args(arguments)
    try:
        plot(read_reports(options.reports), options.statistic, options.out)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except OSError as error:
        parser.exit(3, f"{parser.prog}: expected a file to read and one to write, got {error}. Name another.\n")


if __name__ == "__main__":
    main()
