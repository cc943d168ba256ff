"""Tables of attention.py's result file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


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
        return "not measured"
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
    """Markdown beside the JSON; returns it."""
    result = json.loads(path.read_text())
    lines = [f"# {path.stem}", "", f"`{result['command']}` on {result['device']}, torch {result['torch']}", ""]
    lines += [*(f"- {arm}: {text}" for arm, text in result["arms"].items()), ""]
    latency = result["latency"]
    for dim in dict.fromkeys(row["dim"] for row in latency):
        lines += latency_table(latency, dim)
    lines += casts_table(result["casts"]) if result["casts"] else []
    lines += kept_table(latency) if latency else []
    lines += accuracy_table(result["accuracy"]) if result["accuracy"] else []
    text = "\n".join(lines)
    path.with_suffix(".md").write_text(text)
    return text
