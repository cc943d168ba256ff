"""The quantisation and transpose kernels alone: time, bandwidth and share of the copy rate at Llama-3-8B's shapes.

    python benchmarks/kernels_quantize.py --out quantize.json      # one H200
    python benchmarks/kernels_quantize.py --dry-run                # CPU, tiny, plain torch

What must move is each byte of the input once per read that the algorithm needs (two where a scale comes from the tensor
itself, but one for rows, which stay in registers) and each byte of a plane once. The copy rate is torch's `copy_` of
4 GiB in the same run, read and write counted. Before each timed call 1 GiB is read: nothing of the input lies in the L2
cache, nothing waits there to be written, and the host launches the call meanwhile.

Prediction, written before the first run on an H200: 85 % of a copy of 4.27 TB/s or more for all at the larger shapes;
`amax` only reads, and is faster than a copy; the second read of 64 MiB comes in part from the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_io import command_line, device_name
from timing import copy_rate, make_flush, median_ms

from fp8_ds.formats import E4M3
from fp8_ds.ops.quantize import (
    amax,
    quantize,
    quantize_colwise_t,
    quantize_delayed,
    quantize_delayed_planes,
    quantize_part,
    quantize_planes,
    quantize_rowwise,
    quantize_tensorwise,
    quantize_tensorwise_planes,
)
from fp8_ds.ops.transpose import transpose
from fp8_ds.scaling.granularity import ROW, TILE

SHAPES = [(8192, 4096), (8192, 14336), (16384, 4096)]
"""Tokens by features: hidden and inner activations of 8192 tokens, hidden ones of 16384."""


def kernels(num_rows: int, num_cols: int, device: str) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(name, bytes that must move, the call)."""
    numel = num_rows * num_cols
    x = torch.randn(num_rows, num_cols, device=device, dtype=torch.bfloat16)
    scale, scale_inv = torch.tensor(64.0, device=device), torch.tensor(1 / 64, device=device)
    slot = torch.zeros((), device=device)
    fold = torch.rand(num_cols, device=device)
    fold_rows = torch.rand(num_rows, device=device)
    x_fp8 = quantize(x, scale, E4M3)
    yield "transpose", 2 * numel, lambda: transpose(x_fp8)
    yield "amax", 2 * numel, lambda: amax(x)
    yield "quantize", 3 * numel, lambda: quantize(x, scale, E4M3)
    yield "quantize_planes col", 3 * numel, lambda: quantize_planes(x, scale, E4M3, "col")
    yield "quantize_planes both", 4 * numel, lambda: quantize_planes(x, scale, E4M3, "both")
    yield "quantize_tensorwise", 5 * numel, lambda: quantize_tensorwise(x, E4M3)
    yield "quantize_tensorwise_planes both", 6 * numel, lambda: quantize_tensorwise_planes(x, E4M3, "both")
    yield (
        "quantize_delayed",
        3 * numel,
        lambda: quantize_delayed(x, scale, scale_inv, slot, E4M3, record=True),
    )
    yield (
        "quantize_delayed_planes both",
        4 * numel,
        lambda: quantize_delayed_planes(x, scale, scale_inv, slot, E4M3, "both", record=True),
    )
    yield "quantize_rowwise", 3 * numel + 4 * num_rows, lambda: quantize_rowwise(x, E4M3)
    yield (
        "quantize_rowwise fold",
        3 * numel + 4 * num_rows + 4 * num_cols,
        lambda: quantize_rowwise(x, E4M3, fold),
    )
    # What a step does for a fp32 master: amaxes by row or tile, then the cast by that grid.
    master = torch.randn(numel, device=device)
    for name, granularity in (("row", ROW), ("tile", TILE)):
        grid = torch.ones(granularity.grid((num_rows, num_cols)), device=device)
        block = (granularity.block[0] or 1, granularity.block[1] or num_cols)
        yield f"master amax {name}", 4 * numel, partial(granularity.amax, master, (num_rows, num_cols))
        yield f"quantize_part {name}", 5 * numel, partial(quantize_part, master, grid, 0, num_cols, block, E4M3)
    yield "quantize_colwise_t", 5 * numel + 12 * num_cols, lambda: quantize_colwise_t(x, E4M3)
    yield (
        "quantize_colwise_t fold",
        5 * numel + 12 * num_cols + 8 * num_rows,
        lambda: quantize_colwise_t(x, E4M3, fold_rows),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Kernels by shapes: GB/s and share of the copy rate."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = ["| kernel | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for name in dict.fromkeys(row["kernel"] for row in rows):
        mine = {row["shape"]: row for row in rows if row["kernel"] == name}
        cells = [f"{mine[shape]['GB_per_s']:.0f} ({mine[shape]['share_of_copy']:.0%})" for shape in shapes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Bandwidth of the quantisation and transpose kernels.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--dry-run", action="store_true", help="on CPU with 1/128 of the sides; nothing is timed")
    args = parser.parse_args()
    device, divisor = ("cpu", 128) if args.dry_run else ("cuda", 1)
    flush = None if args.dry_run else make_flush()
    copy = None if args.dry_run else copy_rate(flush)
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy and copy / 1e9, "kernels": []}  # fmt: skip
    print("copy", result["copy_GB_per_s"])
    for num_rows, num_cols in SHAPES:
        for name, moved, call in kernels(num_rows // divisor, num_cols // divisor, device):
            if args.only not in name:
                continue
            call()
            row: dict[str, Any] = {"kernel": name, "shape": f"{num_rows} x {num_cols}", "moved_bytes": moved}
            if copy is not None:
                ms = median_ms(call, flush)
                rate = moved / ms * 1e3
                row |= {"ms": ms, "GB_per_s": rate / 1e9, "share_of_copy": rate / copy}
            result["kernels"].append(row)
            print(json.dumps(row), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if copy is not None:
        print(table(result["kernels"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
