"""RMSNorm and SwiGLU into FP8, and their backwards: bandwidth on activations of Llama-3-8B.

    python benchmarks/kernels_producers.py --out producers.json      # one H200
    python benchmarks/kernels_producers.py --dry-run                 # CPU, tiny, plain torch

What must move is every input once and every output once; with tensorwise scaling, whose amax must be known before the
first byte is written, the inputs twice. Weights, scales and partial sums are not counted. The copy rate is torch's
`copy_` of 4 GiB in the same run, read and write counted. Calls are captured in a CUDA graph over several sets of
tensors, 1 GiB of inputs or more in all, so neither the host's time nor the cache's size enters.

Prediction, written before the first run on an H200: at least 85 % of the copy rate for all but rowwise gradients of
SwiGLU (a row of 14336 leaves room for two programs on a multiprocessor: 75 %) and RMSNorm's backward (its partial sums
are 8 % on top: 80 %); tensorwise above 100 %, since the second pass begins with what is left in the cache.
Columns written where the values are computed (swiglu_columns), before their first run: 75 %, 1.25 times as fast as rows
and a transpose. Measured: 92 %, 1.4 times. Of the gradients both planes at once were no faster than that (predicted
1.3), and are no more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results_io import command_line, device_name
from timing import captured_ms, copy_rate
from torch import Tensor

from fp8_ds.formats import E4M3, E5M2
from fp8_ds.ops.rmsnorm import rmsnorm, rmsnorm_backward
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_packed_to_fp8,
    swiglu_backward_to_fp8,
    swiglu_columns,
)
from fp8_ds.ops.transpose import transpose
from fp8_ds.scaling import AmaxHistory

SHAPES = [(8192, 4096), (8192, 14336), (16384, 4096)]
SCALINGS = ("given", "rowwise", "tensorwise")
INPUT_BYTES = 1 << 30
EPS = 1e-5


@dataclass(frozen=True)
class Inputs:
    """Tensors of one set; gate and up are halves of gate_up, grad has their shape."""

    gate_up: Tensor
    gate: Tensor
    up: Tensor
    grad: Tensor
    weight: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class Case:
    """One call, and the bytes that it must move for each element of [T, C]."""

    name: str
    bytes_per_element: int
    call: Callable[[Inputs], object]


def make_inputs(num_rows: int, num_cols: int, device: str) -> Inputs:
    gate_up = torch.randn(num_rows, 2 * num_cols, dtype=torch.bfloat16, device=device)
    gate, up = gate_up.chunk(2, dim=1)
    grad = torch.randn(num_rows, num_cols, dtype=torch.bfloat16, device=device)
    weight = torch.ones(num_cols, dtype=torch.bfloat16, device=device)
    return Inputs(gate_up, gate, up, grad, weight, torch.ones(num_rows, device=device))


def make_cases(device: str) -> list[Case]:
    history = AmaxHistory(2, [E4M3.max, E5M2.max], device=device)
    slots = history.slot(0), history.slot(1)
    cases = []
    for name in SCALINGS:
        one = slots[0] if name == "given" else name
        two = slots if name == "given" else name
        reads = 2 if name == "tensorwise" else 1
        cases += [
            Case(f"rmsnorm {name}", 2 * reads + 1, lambda x, one=one: rmsnorm(x.grad, x.weight, EPS, E4M3, one)),
            Case(f"swiglu {name}", 4 * reads + 1, lambda x, one=one: swiglu(x.gate, x.up, E4M3, one)),
            Case(
                f"swiglu_backward_to_fp8 {name}",
                6 * reads + 2,
                lambda x, two=two: swiglu_backward_to_fp8(x.grad, x.gate, x.up, E5M2, two),
            ),
        ]
        if name != "rowwise":
            cases += [
                Case(
                    f"swiglu_columns {name}", 4 * reads + 1, lambda x, one=one: swiglu_columns(x.gate, x.up, E4M3, one)
                ),
                Case(
                    f"swiglu_columns {name}, by a transpose",
                    4 * reads + 1,
                    lambda x, one=one: transpose(swiglu(x.gate, x.up, E4M3, one, record=False).x_fp8),
                ),
            ]
    return [
        *cases,
        Case("rmsnorm rowwise + bf16", 5, lambda x: rmsnorm(x.grad, x.weight, EPS, E4M3, "rowwise", with_hp=True)),
        Case("rmsnorm_backward", 6, lambda x: rmsnorm_backward(x.gate, x.grad, x.weight, x.rstd)),
        Case("rmsnorm_backward + residual", 8, lambda x: rmsnorm_backward(x.gate, x.grad, x.weight, x.rstd, x.up)),
        Case("swiglu rowwise + bf16", 7, lambda x: swiglu(x.gate, x.up, E4M3, "rowwise", with_hp=True)),
        Case("swiglu_backward bf16", 10, lambda x: swiglu_backward(x.grad, x.gate, x.up)),
        Case(
            "swiglu_backward_packed_to_fp8 rowwise",
            8,
            lambda x: swiglu_backward_packed_to_fp8(x.grad, x.gate_up, E5M2, "rowwise"),
        ),
    ]


def run_shape(num_rows: int, num_cols: int, device: str, copy: float | None, only: str) -> list[dict[str, Any]]:
    set_bytes = 3 * 2 * num_rows * num_cols
    num_sets = 1 if device == "cpu" else max(2, -(-INPUT_BYTES // set_bytes))
    sets = [make_inputs(num_rows, num_cols, device) for _ in range(num_sets)]
    rows = []
    for case in make_cases(device):
        if only not in case.name:
            continue
        moved = case.bytes_per_element * num_rows * num_cols
        row: dict[str, Any] = {"case": case.name, "rows": num_rows, "cols": num_cols, "moved_bytes": moved}
        if device == "cpu":
            case.call(sets[0])
        else:
            assert copy is not None
            ms = captured_ms(case.call, sets)
            rate = moved / ms * 1e3
            row |= {"us": ms * 1e3, "GB_per_s": rate / 1e9, "share_of_copy": rate / copy}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | rows x cols | us | GB/s | of copy |", "|---|---|---|---|---|"]
    for row in rows:
        measured = f"{row['us']:.1f} | {row['GB_per_s']:.0f} | {row['share_of_copy']:.0%}" if "us" in row else " | | "
        lines.append(f"| {row['case']} | {row['rows']} x {row['cols']} | {measured} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Bandwidth of the fused FP8 producers.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="run the cases with this in their name")
    parser.add_argument("--dry-run", action="store_true", help="on CPU with 1/64 of the sides")
    args = parser.parse_args()
    device, divisor = ("cpu", 64) if args.dry_run else ("cuda", 1)
    copy = None if args.dry_run else copy_rate()
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy and copy / 1e9, "cases": []}  # fmt: skip
    print("copy", result["copy_GB_per_s"])
    for num_rows, num_cols in SHAPES:
        result["cases"] += run_shape(num_rows // divisor, num_cols // divisor, device, copy, args.only)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(table(result["cases"]))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
