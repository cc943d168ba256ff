"""Tables and plots of attention.py's result file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
COLORS = {
    "FA3 bf16": "tab:blue",
    "FA3 FP8": "tab:red",
    "FA3 FP8 rotated": "tab:orange",
    "cuDNN bf16": "tab:green",
    "cuDNN FP8 (TE)": "tab:olive",
    "SDPA flash (FA2)": "tab:gray",
    "FlexAttention": "tab:purple",
}


def latency_table(rows: Rows, dim: int) -> list[str]:
    """Arms by lengths: ms and TFLOP/s, forward and backward."""
    mine = [row for row in rows if row["dim"] == dim]
    lengths = sorted({row["length"] for row in mine})
    lines = [
        f"Head dim {dim}: ms forward + backward (TFLOP/s forward / backward)",
        "",
        "| | " + " | ".join(f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in mine):
        by_length = {row["length"]: row for row in mine if row["arm"] == arm}
        lines.append(f"| {arm} | " + " | ".join(_latency_cell(by_length.get(length)) for length in lengths) + " |")
    return [*lines, ""]


def _latency_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "left out"
    if "error" in row:
        return f"**{row['error'][:120].replace('|', '/')}**"
    if "forward_ms" not in row:
        return "not timed"
    rates = f"({row['forward_tflops']:.0f} / {row['backward_tflops']:.0f})"
    return f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} {rates}"


def casts_table(rows: Rows) -> list[str]:
    lines = ["| parts alone, ms | quantise q, k, v | rotate and quantise | de-quantise |", "|---|---|---|---|"]
    for row in rows:
        names = ("quantize", "quantize_rotated", "dequantize")
        cells = [f"{row[f'{name}_ms']:.3f}" if f"{name}_ms" in row else "not timed" for name in names]
        lines.append(f"| head dim {row['dim']}, {row['length']} x {row['batch']} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def kept_table(rows: Rows) -> list[str]:
    """Bytes a token and head that autograd keeps."""
    lines = [
        "| kept for the backward, bytes a token and head | " + " | ".join(("dim 128", "dim 64")) + " |",
        "|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for dim in (128, 64):
            row = next((r for r in rows if r["arm"] == arm and r["dim"] == dim and "kept_mib" in r), None)
            size = row and row["kept_mib"] * 2**20 / (row["batch"] * row["length"] * row["heads"])
            cells.append("" if size is None else f"{size:.0f}")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def accuracy_table(rows: Rows) -> list[str]:
    """SQNR in dB and RMSE of the output and the gradients, by inputs and arm."""
    lines = [
        "| inputs | head dim | arm | output: SQNR dB (RMSE) | dq | dk | dv |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['inputs']} | {row['dim']} | {row['arm']} | "
        if "error" in row:
            lines.append(head + f"**{row['error'][:120]}** | | | |")
            continue
        cells = [f"{row[f'{name}_sqnr_db']:.1f} ({row[f'{name}_rmse']:.1e})" for name in ("out", "dq", "dk", "dv")]
        lines.append(head + " | ".join(cells) + " |")
    return [*lines, ""]


def publish(path: Path) -> str:
    """Markdown and plots beside the JSON; returns the Markdown."""
    result = json.loads(path.read_text())
    stem = path.with_suffix("")
    lines = [f"# {stem.name}", "", f"`{result['command']}` on {result['device']}, torch {result['torch']}", ""]
    lines += [f"- {arm}: {text}" for arm, text in result["arms"].items()]
    lines += [f"- left out for time: {what}" for what in result["left_out"]] + [""]
    latency = result["latency"]
    if any("forward_ms" in row for row in latency):
        _plot(stem.with_name(f"{stem.name}-latency.png"), lambda axes: _latency_axes(axes, latency), (2, 2))
        lines += [f"![latency]({stem.name}-latency.png)", ""]
    for dim in dict.fromkeys(row["dim"] for row in latency):
        lines += latency_table(latency, dim)
    lines += casts_table(result["casts"]) if result["casts"] else []
    lines += kept_table(latency) if latency else []
    if rows := result["accuracy"]:
        _plot(stem.with_name(f"{stem.name}-accuracy.png"), lambda axes: _accuracy_axes(axes, rows), (1, 4))
        lines += [f"![accuracy]({stem.name}-accuracy.png)", "", *accuracy_table(rows)]
    text = "\n".join(lines)
    stem.with_suffix(".md").write_text(text)
    return text


def _plot(path: Path, draw: Callable[[Any], None], shape: tuple[int, int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        *shape, figsize=(4.2 * shape[1] + 2, 3.4 * shape[0] + 1.6), squeeze=False, layout="constrained"
    )
    draw(axes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _latency_axes(axes: Any, rows: Rows) -> None:
    """TFLOP/s over the length: a row for each direction, a column for each head dim."""
    for column, dim in enumerate(sorted({row["dim"] for row in rows}, reverse=True)[:2]):
        for line, direction in enumerate(("forward", "backward")):
            axis = axes[line, column]
            for arm in dict.fromkeys(row["arm"] for row in rows):
                points = sorted((r["length"], r[f"{direction}_tflops"]) for r in rows
                                if r["arm"] == arm and r["dim"] == dim and f"{direction}_tflops" in r)  # fmt: skip
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=arm, color=COLORS.get(arm))
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{direction}, head dim {dim}, causal: TFLOP/s", fontsize=9)
            axis.tick_params(labelsize=8)
    axes[0, 0].legend(fontsize=7)


def _accuracy_axes(axes: Any, rows: Rows) -> None:
    """SQNR of the output and the gradients: a bar for each arm, groups by inputs."""
    good = [row for row in rows if "error" not in row]
    arms = list(dict.fromkeys(row["arm"] for row in good))
    groups = list(dict.fromkeys((row["inputs"], row["dim"]) for row in good))
    for axis, name in zip(axes[0], ("out", "dq", "dk", "dv"), strict=True):
        for i, arm in enumerate(arms):
            by_group = {(row["inputs"], row["dim"]): row[f"{name}_sqnr_db"] for row in good if row["arm"] == arm}
            places = [place + i * 0.8 / len(arms) for place in range(len(groups))]
            axis.barh(places, [by_group.get(group, 0.0) for group in groups], 0.8 / len(arms), label=arm)
        axis.set_yticks(range(len(groups)), [f"{inputs}, {dim}" for inputs, dim in groups], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{name}: SQNR to float64, dB", fontsize=9)
        axis.tick_params(labelsize=7)
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
