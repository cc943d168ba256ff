"""Where an FP8 linear pays: forward and backward of one linear, FP8 beside bf16, by tokens and features.

    python benchmarks/linear_sizes.py --budget 240 --out $OUT

Two costs of a linear, in microseconds: the GPU's time alone, from calls that queue up while the GPU is kept busy, as
in a compiled model; and time by the clock in eager mode, several layers after each other without a wait, where the host
may be what is slow. FP8 weights are bytes already, as in an engine; `quantize_us` is what making them of bf16 takes the
GPU, which an engine does within its optimizer step. Each cell is saved when it is done; the next call with the same
--out, on the same day, measures those that are missing. Without a GPU: tiny sizes, by the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from linear_host import put_into_fp8
from results_io import command_line, dated_stem, device_name, heading
from torch import Tensor, nn

from fp8_ds.host import uses_cuda
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.quantize import quantize

ENABLED = {"recipe": "delayed", "grad_dtype": "e4m3", "fast_accumulation": "output_and_grad_input"}
ARMS: dict[str, dict[str, str] | None] = {"bf16": None, "delayed": ENABLED, "tensorwise": {}}
"""The "linear" block of each arm: none, what `{"enabled": true}` becomes, and the block's own defaults."""
TOKENS = (8192, 2048, 32768, 4096, 16384, 1024, 65536)
"""Of one rank and micro-batch, in the order of measurement."""
FEATURES = (
    (4096, 4096), (1024, 4096), (4096, 14336), (768, 3072), (2048, 2048), (768, 768), (1024, 1024), (2048, 5632),
    (3072, 768), (4096, 1024), (2048, 512), (5632, 2048), (14336, 4096), (8192, 8192), (8192, 28672),
)  # fmt: skip
"""(input, output) features: GPT-2 small, widths 1024 and 2048, Llama-3-8B and 70B."""
TINY = ((32, 64), ((32, 48), (48, 32)))
LARGE = 1 << 39
"""Multiplications of one product from which fewer layers are called, fewer times: the host is far ahead anyway."""
NUM_CYCLES = 1 << 24
"""For which the GPU waits while a call is launched: 8 ms at 2 GHz, doubled where that is not enough."""


class Layers:
    """Forward and backward of several equal linears that all read `x`; gradients of inputs and weights are dropped."""

    def __init__(self, weights: Sequence[Tensor], x: Tensor, grad: Tensor, keys: dict[str, str] | None) -> None:
        self.linears = [nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta", dtype=w.dtype) for w in weights]
        for linear, weight in zip(self.linears, weights, strict=True):
            linear.weight = nn.Parameter(weight.clone())
        self.x = x
        self.grad = grad
        history = None if keys is None else put_into_fp8(self.linears, keys, x.device)
        self()
        if history is not None:  # from its first update on it scales by what it remembers
            history.update(history.amax_local.clone())
        self()

    def __call__(self) -> None:
        inputs = [self.x.detach().requires_grad_() for _ in self.linears]
        outputs = [linear(x) for linear, x in zip(self.linears, inputs, strict=True)]
        torch.autograd.backward(outputs, [self.grad] * len(outputs))
        for linear in self.linears:
            linear.weight.grad = None


def device_time(call: Callable[[], object]) -> float:
    """Seconds of one call by the GPU's clock, launched while the GPU waits; without a GPU, by the host's clock."""
    if not uses_cuda():
        return clock_time(call, 1)
    cycles = NUM_CYCLES
    while True:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        begin.record()
        call()
        end.record()
        was_ahead = not begin.query()  # the host, by the whole call
        end.synchronize()
        if was_ahead:
            return begin.elapsed_time(end) / 1000
        cycles *= 2


def clock_time(call: Callable[[], object], num_calls: int) -> float:
    """Seconds of one call by the clock, of several without a wait in between."""
    if uses_cuda():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    if uses_cuda():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_calls


def measure(tokens: int, features: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """One cell: {"tokens", "in", "out", "gpu_us": {arm: ...}, "eager_us": {arm: ...}, "quantize_us"}, arms in turns."""
    num_in, num_out = features
    is_large = tokens * num_in * num_out >= LARGE
    num_layers, num_rounds, num_calls = (2, 3, 1) if is_large else (4, 5, 3)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    weights = [normal(num_out, num_in) for _ in range(num_layers)]
    x, grad = normal(tokens, num_in), normal(tokens, num_out)
    arms = {name: Layers(weights, x, grad, keys) for name, keys in ARMS.items()}
    times: dict[str, dict[str, list[float]]] = {"gpu_us": {}, "eager_us": {}}
    for _ in range(num_rounds):
        for name, layers in arms.items():
            times["gpu_us"].setdefault(name, []).append(device_time(layers) / num_layers)
            times["eager_us"].setdefault(name, []).append(clock_time(layers, num_calls) / num_layers)
    scale = torch.ones((), device=device)
    quantizing = [device_time(lambda: [quantize(w, scale, E4M3) for w in weights]) for _ in range(num_rounds)]
    return {
        "tokens": tokens,
        "in": num_in,
        "out": num_out,
        **{kind: {name: _us(column) for name, column in found.items()} for kind, found in times.items()},
        "quantize_us": round(_us(quantizing) / num_layers, 1),
    }


def _us(seconds: Sequence[float]) -> float:
    return round(1e6 * median(seconds), 1)


def report(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: by how much FP8 is faster, GPU / eager, a table for each recipe; and the microseconds."""
    tokens, features = sorted({cell["tokens"] for cell in cells}), sorted({(cell["in"], cell["out"]) for cell in cells})
    by_size = {(cell["in"], cell["out"], cell["tokens"]): cell for cell in cells}
    lines = []
    for arm in list(ARMS)[1:]:
        lines += [f"{arm}: bf16's time over FP8's, GPU alone / eager; columns are tokens.", ""]
        lines += [f"| in x out | {' | '.join(map(str, tokens))} |", "|---" * (1 + len(tokens)) + "|"]
        for one in features:
            row = [by_size.get((*one, number)) for number in tokens]
            texts = ["" if cell is None else " / ".join(
                f"{cell[kind]['bf16'] / cell[kind][arm]:.2f}" for kind in ("gpu_us", "eager_us")) for cell in row
            ]  # fmt: skip
            lines.append(f"| {one[0]} x {one[1]} | {' | '.join(texts)} |")
        lines.append("")
    lines += [f"Microseconds of a linear, {', '.join(ARMS)}; and quantize of its weight.", ""]
    lines += ["| in x out, tokens | GPU | eager | quantize |", "|---|---|---|---|"]
    for size in sorted(by_size):
        cell = by_size[size]
        costs = " | ".join(" ".join(f"{us:.0f}" for us in cell[kind].values()) for kind in ("gpu_us", "eager_us"))
        lines.append(f"| {size[0]} x {size[1]}, {size[2]} | {costs} | {cell['quantize_us']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a linear by its sizes, FP8 beside bf16.")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no cell is begun")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    start, device = time.perf_counter(), torch.device("cuda" if uses_cuda() else "cpu")
    tokens, features = (TOKENS, FEATURES) if uses_cuda() else TINY
    stem = dated_stem(args.out, "linear-sizes")
    path = stem.with_suffix(".json")
    about = {"device": device_name(), "torch": torch.__version__, "command": command_line(), "linear": ENABLED}
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else []
    done = {(cell["tokens"], cell["in"], cell["out"]) for cell in cells}
    for size in ((number, one) for number in tokens for one in features):
        if (size[0], *size[1]) in done:
            continue
        if time.perf_counter() - start > args.budget:
            print(f"The budget of {args.budget:.0f} s is spent: {len(cells)} cells of {len(tokens) * len(features)}.")
            break
        cells.append(measure(*size, device))
        gc.collect()
        rows = ",\n".join(map(json.dumps, cells))
        path.write_text(f'{json.dumps(about)[:-1]}, "cells": [\n{rows}\n]}}\n')
        stem.with_suffix(".md").write_text(heading(stem.name) + report(cells))
    print(report(cells).partition("Microseconds")[0] + f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
