"""Fast accumulation of FP8 products: what it gains in time, and what it costs in precision. Writes dated results.

    python benchmarks/accumulation.py --out benchmarks/results      # one H200, a minute
    python benchmarks/accumulation.py --dry-run --out .out          # CPU, tiny: the calls, no statement on either

Time: the 21 products of a Llama-8B decoder layer (7 linears, 8192 tokens), by `fp8_ds.ops.gemm.scaled_mm`, captured
in a CUDA graph that is replayed for seconds on end: such a GPU is at its power cap then, as it is in training, and a
product that takes less energy runs at a higher clock. Settings take turns, twice.

Precision: products of [1024, K] by [1024, K], results in float32, against the exact product of the same FP8 numbers.
"normal": standard normal numbers, whose products cancel. "with a mean": 0.5 added to all, so that sums grow with their
length (43 % of the products are negative still). The bias of a sum is the share of it that is missing, by least
squares: -0.01 is 1 % too small.

Predicted, by a trial on another H200: 8.87 ms with accurate gradients, 8.64 with a fast grad_input, 8.50 with both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from results_io import dated_stem, heading
from torch import Tensor

from fp8_ds.config import Gemm, LinearConfig
from fp8_ds.formats import BY_NAME, E4M3
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import sqnr_db

TOKENS = 8192
LINEARS = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
"""(input, output) features: q, k, v, o, gate, up, down."""
SETTINGS = tuple(itertools.product(("e5m2", "e4m3"), ("output", "output_and_grad_input", "all")))
LENGTHS = (1024, 4096, 8192, 14336, 32768, 65536)
ROWS = 1024
WARM_SECONDS = 0.5

Operand = tuple[Tensor, Tensor]
"""FP8 [rows, K] and its scale_inv."""
Products = list[tuple[Gemm, Operand, Operand]]


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of one layer's products, each time that they were measured."""

    grad_dtype: str
    fast_accumulation: str
    ms: tuple[float, ...]


@dataclass(frozen=True)
class SumError:
    """Of one length and kind of data: decibels of the product over its error, and the bias of its sums."""

    length: int
    data: str
    dtype: str
    quantization_db: float
    accurate_db: float
    fast_db: float
    fast_bias: float


def operand(rows: int, columns: int, dtype: str, device: str) -> Operand:
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    return quantize_tensorwise(x, BY_NAME[dtype])


def products_of_a_layer(grad_dtype: str, divisor: int, device: str) -> Products:
    found: Products = []
    tokens = TOKENS // divisor
    for num_in, num_out in LINEARS:
        k, n = num_in // divisor, num_out // divisor
        found.append(("output", operand(tokens, k, "e4m3", device), operand(n, k, "e4m3", device)))
        found.append(("grad_input", operand(tokens, n, grad_dtype, device), operand(k, n, "e4m3", device)))
        found.append(("grad_weight", operand(n, tokens, grad_dtype, device), operand(k, tokens, "e4m3", device)))
    return found


def step_of(products: Products, fast_accumulation: str) -> Callable[[], None]:
    fast = LinearConfig.model_validate({"fast_accumulation": fast_accumulation}).fast_gemms

    def step() -> None:
        for gemm, (a, scale_inv_a), (b, scale_inv_b) in products:
            scaled_mm(a, b, scale_inv_a, scale_inv_b, torch.bfloat16, use_fast_accum=gemm in fast)

    return step


def sustained_ms(step: Callable[[], None], seconds: float, device: str) -> float:
    """Milliseconds of a step among many that follow each other without a pause."""
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - begin)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    once = _replays_ms(graph, 3)
    _replays_ms(graph, round(1000 * WARM_SECONDS / once))
    return _replays_ms(graph, max(3, round(1000 * seconds / once)))


def _replays_ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def layer_times(seconds: float, divisor: int, device: str) -> list[LayerTime]:
    products = {dtype: products_of_a_layer(dtype, divisor, device) for dtype in ("e5m2", "e4m3")}
    rounds = [
        {setting: sustained_ms(step_of(products[setting[0]], setting[1]), seconds, device) for setting in SETTINGS}
        for _ in range(2)
    ]
    return [LayerTime(*setting, tuple(each[setting] for each in rounds)) for setting in SETTINGS]


def sum_error(length: int, data: str, dtype: str, rows: int, device: str) -> SumError:
    x, y = (torch.randn(rows, length, device=device) + (0.5 if data == "with a mean" else 0.0) for _ in range(2))
    x_fp8, x_scale_inv = quantize_tensorwise(x, BY_NAME[dtype])
    y_fp8, y_scale_inv = quantize_tensorwise(y, E4M3)
    exact = (x_fp8.double() * x_scale_inv.double()) @ (y_fp8.double() * y_scale_inv.double()).t()
    accurate, fast = (
        scaled_mm(x_fp8, y_fp8, x_scale_inv, y_scale_inv, torch.float32, use_fast_accum=is_fast).double()
        for is_fast in (False, True)
    )
    return SumError(
        length,
        data,
        dtype,
        quantization_db=sqnr_db(x.double() @ y.double().t(), exact),
        accurate_db=sqnr_db(exact, accurate),
        fast_db=sqnr_db(exact, fast),
        fast_bias=float(((fast - exact) * exact).sum() / exact.square().sum()),
    )


def report(times: list[LayerTime], errors: list[SumError]) -> str:
    base = min(times[0].ms)
    lines = [
        "## A layer's products, sustained\n",
        "| gradients | fast | ms, twice | of accurate gradients |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.grad_dtype} | {row.fast_accumulation} | {', '.join(f'{ms:.3f}' for ms in row.ms)} "
        f"| {min(row.ms) / base:.3f} |"
        for row in times
    ]
    lines += [
        "\n## Sums by their length\n",
        "SQNR in dB: of rounding both operands to FP8, of adding accurately, of adding fast.\n",
    ]
    lines += ["| length | data | a | rounding | accurate | fast | bias of fast sums |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.length} | {row.data} | {row.dtype} | {row.quantization_db:.1f} | {row.accurate_db:.1f} "
        f"| {row.fast_db:.1f} | {row.fast_bias:+.1e} |"
        for row in errors
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each setting and turn")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    device, divisor = ("cpu", 64) if args.dry_run else ("cuda", 1)
    torch.manual_seed(0)
    times = layer_times(args.seconds, divisor, device)
    errors = [
        sum_error(length // divisor, data, dtype, ROWS // divisor, device)
        for data in ("normal", "with a mean")
        for dtype in ("e5m2", "e4m3")
        for length in LENGTHS
    ]
    stem = dated_stem(args.out, "accumulation")
    text = heading(stem.name) + report(times, errors)
    stem.with_suffix(".md").write_text(text)
    found = {"layer": [asdict(row) for row in times], "sums": [asdict(row) for row in errors]}
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
