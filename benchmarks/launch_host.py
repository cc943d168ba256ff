"""What it takes the host to launch an op's kernels: as Triton does it, and by fp8_ds.ops._launch. Writes dated results.

    python benchmarks/launch_host.py --out $OUT

Microseconds of a call of an op, its allocations included, the GPU not waited for; the median of 9 samples of 200 calls,
both ways in turns. Without a GPU a stand-in for Triton's driver starts nothing (fp8_ds/testing/stand_in_driver.py):
what is measured then is all but the driver's own launch, the same both ways, about 5 us on an H200's host.

Predicted before the first run on an H200, where traces of 2026-11-22 show 136 to 167 us for `tensorwise, both planes`
and 37 to 104 for `transpose`: 60 and 30.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from results_io import command_line, dated_stem, device_name, heading
from triton.runtime import driver

from fp8_ds.device import uses_cuda
from fp8_ds.ops import _launch
from fp8_ds.ops.quantize import triton as quantize
from fp8_ds.ops.rmsnorm import triton as rmsnorm
from fp8_ds.ops.swiglu import triton as swiglu
from fp8_ds.ops.transpose import triton as transpose
from fp8_ds.testing.stand_in_driver import StandInDriver

NUM_SAMPLES, NUM_CALLS, NUM_WARM = 9, 200, 20
WAYS = {"triton": True, "launch": False}
"""Whether `launch` leaves everything to Triton."""


def ops(device: torch.device) -> dict[str, Callable[[], Any]]:
    """By name, on small tensors."""
    x = torch.ones(256, 512, dtype=torch.bfloat16, device=device)
    x_fp8 = x.to(torch.float8_e4m3fn)
    one, two, three = (torch.ones((), device=device) for _ in range(3))
    e4m3 = (torch.float8_e4m3fn, 448.0)
    weight, rstd = x[0].contiguous(), torch.ones(len(x), device=device)
    return {
        "transpose": lambda: transpose.transpose(x_fp8),
        "tensorwise, rows": lambda: quantize.quantize_tensorwise_planes(x, *e4m3, "row"),
        "tensorwise, both planes": lambda: quantize.quantize_tensorwise_planes(x, *e4m3, "both"),
        "delayed, both planes": lambda: quantize.quantize_delayed_planes(x, one, two, three, True, *e4m3, "both"),
        "rowwise": lambda: quantize.quantize_rowwise(x, None, *e4m3),
        "SwiGLU's backward": lambda: swiglu.swiglu_backward(x, x, x, False, True),
        "RMSNorm's backward": lambda: rmsnorm.rmsnorm_backward(x, x, weight, rstd, None),
    }


def microseconds(op: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Of a call, by way."""
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(NUM_SAMPLES + 1):
        for way, by_triton in WAYS.items():
            _launch._BY_TRITON = by_triton
            calls = NUM_CALLS if number else NUM_WARM
            start = time.perf_counter()
            for _ in range(calls):
                op()
            elapsed = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                samples[way].append(1e6 * elapsed / calls)
    return {way: round(median(values), 1) for way, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if uses_cuda() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        stand_in = StandInDriver()
        stand_in.writes = False
        driver.set_active(stand_in)
    rows = {name: microseconds(op, device) for name, op in ops(device).items()}
    stem = dated_stem(args.out, "launch-host")
    about = {"device": device_name(), "torch": torch.__version__, "triton": triton.__version__}
    record = {**about, "command": command_line(), "microseconds": rows}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [f"Triton {triton.__version__}. Microseconds of the host for a call of an op:", ""]
    lines += ["| op | Triton's launch | fp8_ds.ops._launch |", "|---|---|---|"]
    lines += [f"| {name} | {row['triton']:.0f} | {row['launch']:.0f} |" for name, row in rows.items()]
    text = heading(stem.name) + "\n".join(lines) + "\n"
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
