"""Blockwise quantisation, its transpose and amaxes, and the blockwise GEMM, on shapes of Llama-3-8B.

    python benchmarks/kernels_blockwise.py --out blockwise.json   # one H200
    python benchmarks/kernels_blockwise.py --dry-run              # CPU, tiny, plain torch
    python benchmarks/kernels_blockwise.py --warps "4 8 16"       # other numbers of warps a program

What must move is every byte of the input once and every byte of the planes and their scales once. The copy rate is
torch's `copy_` of 4 GiB in the same run, read and write counted. Inputs and outputs rotate over more bytes than the
50 MB of L2 hold, so that nothing is read there and all that is written leaves it.

Predictions, written before the first run on an H200: at 85 % of a copy of 4.27 TB/s "both" of a bf16 [8192, 14336] in
1x128 blocks takes 0.13 ms. The row plane alone is nearest to the copy; "both" has 16 instructions an element where the
GPU has time for 27, and two programs of 256 threads on a processor to hide the waiting with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_io import command_line, device_name
from timing import copy_rate, make_flush, median_ms
from torch import Tensor

from fp8_ds.formats import E4M3
from fp8_ds.ops.blockwise import block_amax, quantize_blockwise, transpose_blockwise
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise

SHAPES = [(8192, 4096), (8192, 14336), (16384, 4096)]
PRODUCTS = [(8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 4096)]
"""M, K, N of `output`."""

ROWS, SQUARES = (1, 128), (128, 128)
PEAK_FP8 = 1979e12
"""Dense FP8 operations per second of an H200 SXM. Source: NVIDIA H200 data sheet (3958 with sparsity)."""


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def arms() -> dict[str, Callable[[Tensor], tuple[Iterable[Tensor | None], Callable[[], Any]]]]:
    """Name to: of a bf16 matrix, what is read, and the call that gives what is written."""

    def quantize(block: tuple[int, int], planes: Any, dtype: torch.dtype) -> Callable[[Tensor], Any]:
        def prepare(x: Tensor) -> Any:
            x = x.to(dtype)
            return (x,), lambda: quantize_blockwise(x, E4M3, block, planes)

        return prepare

    def transpose(x: Tensor) -> Any:
        row = quantize_blockwise(x, E4M3, ROWS, "row")
        assert row.x_fp8 is not None and row.scale_inv is not None
        x_fp8, scale_inv = row.x_fp8, row.scale_inv
        return (x_fp8, scale_inv), lambda: transpose_blockwise(x_fp8, scale_inv)

    def amax(x: Tensor) -> Any:
        x = x.float()
        return (x,), lambda: (block_amax(x, SQUARES),)

    bf16 = torch.bfloat16
    return {
        "1x128 row": quantize(ROWS, "row", bf16),
        "1x128 col": quantize(ROWS, "col", bf16),
        "1x128 both": quantize(ROWS, "both", bf16),
        "1x128 both, fp32": quantize(ROWS, "both", torch.float32),
        "128x128 row": quantize(SQUARES, "row", bf16),
        "128x128 both": quantize(SQUARES, "both", bf16),
        "transpose of codes": transpose,
        "amax of 128x128, fp32": amax,
    }


def run_kernel(
    name: str, prepare: Any, shape: tuple[int, int], device: str, copy: float | None, flush: Tensor | None
) -> dict[str, Any]:
    read, call = prepare(torch.randn(shape, dtype=torch.bfloat16, device=device))
    moved = num_bytes(read) + num_bytes(call())
    row: dict[str, Any] = {"kernel": name, "shape": shape, "moved_bytes": moved}
    if flush is None or copy is None:
        return row
    ms = median_ms(call, flush)
    rate = moved / ms * 1e3
    return row | {"ms": ms, "GB_per_s": rate / 1e9, "share_of_copy": rate / copy}


def run_product(name: str, shape: tuple[int, int, int], device: str, flush: Tensor | None) -> dict[str, Any]:
    num_m, num_k, num_n = shape
    x = torch.randn(num_m, num_k, dtype=torch.bfloat16, device=device)
    weight = torch.randn(num_n, num_k, dtype=torch.bfloat16, device=device)
    if name == "tensorwise":
        one = torch.ones((), device=device)
        a, b = x.to(E4M3.dtype), weight.to(E4M3.dtype)
        call: Callable[[], object] = partial(scaled_mm, a, b, one, one, torch.bfloat16)
    else:
        block_b = SQUARES if name.endswith("128x128") else ROWS
        a_planes, b_planes = quantize_blockwise(x, E4M3, ROWS, "row"), quantize_blockwise(weight, E4M3, block_b, "row")
        args: Any = (a_planes.x_fp8, b_planes.x_fp8, a_planes.scale_inv, b_planes.scale_inv)
        call = partial(scaled_mm_blockwise, *args, torch.bfloat16)
    call()
    row: dict[str, Any] = {"product": name, "shape": shape}
    if flush is None:
        return row
    ms = median_ms(call, flush)
    rate = 2 * num_m * num_k * num_n / ms * 1e3
    return row | {"ms": ms, "TFLOP_per_s": rate / 1e12, "share_of_peak": rate / PEAK_FP8}


def set_warps(warps: int | None) -> None:
    if warps is not None:
        from fp8_ds.ops.blockwise import triton  # the package is missing where there is no GPU

        triton.WARPS.update(dict.fromkeys(triton.WARPS, warps))


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        name, shape = row.get("kernel") or row["product"], "x".join(map(str, row["shape"]))
        if "GB_per_s" in row:
            measured = f"{row['ms']:8.4f} ms {row['GB_per_s']:6.0f} GB/s {row['share_of_copy']:6.1%} of copy"
        elif "TFLOP_per_s" in row:
            measured = f"{row['ms']:8.4f} ms {row['TFLOP_per_s']:6.0f} TFLOP/s {row['share_of_peak']:6.1%} of peak"
        else:
            measured = "ran"
        lines.append(f"{name:24} {shape:>16} {'' if row['warps'] is None else row['warps']!s:>3} {measured}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Blockwise kernels: share of the copy rate, and of the FP8 peak.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--warps", default="", help="numbers of warps a program, each tried on every kernel")
    parser.add_argument("--dry-run", action="store_true", help="on CPU with 1/32 of the sides")
    args = parser.parse_args()
    device, divisor = ("cpu", 32) if args.dry_run else ("cuda", 1)
    flush = None if args.dry_run else make_flush()
    copy = None if args.dry_run else copy_rate(flush)
    rows: list[dict[str, Any]] = []
    for warps in [int(number) for number in args.warps.split()] or [None]:
        set_warps(warps)
        for name, prepare in arms().items():
            for rows_of_x, cols in SHAPES:
                shape = (rows_of_x // divisor, cols // divisor)
                rows.append(run_kernel(name, prepare, shape, device, copy, flush) | {"warps": warps})
    for name in ("tensorwise", "1x128 by 128x128", "1x128 by 1x128"):
        for m, k, n in PRODUCTS:
            rows.append(run_product(name, (m // divisor, k // divisor, n // divisor), device, flush) | {"warps": None})
    result = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
              "copy_GB_per_s": copy and copy / 1e9, "rows": rows}  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if copy is not None:
        print(f"copy {copy / 1e9:.0f} GB/s")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
