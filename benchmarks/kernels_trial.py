"""Kernels at 32 to 256 MiB, as they ship and with settings that are on trial, beside a copy of as many bytes.

    python benchmarks/kernels_trial.py --out trial.json      # one H100 or H200; compiles on all cores, then times
    python benchmarks/kernels_trial.py --check               # CPU, Triton's interpreter: the bits of the references
    python benchmarks/kernels_trial.py --dry                 # CPU: the ops' calls, tiny, and the table without times

The method is that of kernels_tune.py, whose kernels these are: constants of fp8_ds/ops/*/triton.py that are others for
one call, CUDA graphs over 1 GiB of inputs. Each setting is timed in two rounds, the shipped one with them; the smaller
time counts, and both are kept. What lost is gone from the code: benchmarks/results/2026-11-26-kernels-trial.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if {"--check", "--dry"} & set(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton looks at when it is imported

import torch
from kernels_tune import KERNELS, SET_BYTES, Kernel, Setting, _tensors, applied, equal_copy_ms, same_bits, shipped
from results_io import command_line, device_name
from timing import captured_ms, copy_rate

SHAPES = ((8192, 2048), (8192, 4096), (8192, 8192), (8192, 14336), (16384, 8192))
"""32, 64, 128, 224 and 256 MiB of bf16."""
WIDEST_NORM = 8192
"""Columns: wider rows are no model's hidden size."""
ROUNDS = 2


TRIALS: dict[str, list[Setting]] = {
    "rmsnorm": [],
    "rmsnorm_backward": [
        {"_SUM_COLS": 8, "_SUM_STEPS": True},
        *(
            {"_SUM_COLS": 8, "_SUM_STEPS": True} | setting
            for setting in (
                {"_BACKWARD_WARPS": 16},
                {"_BACKWARD_WARPS": 16, "_TWO_AHEAD": True},
                {"_BACKWARD_WARPS": 32, "_PER_THREAD_BACKWARD": 8},
                {"_BACKWARD_WARPS": 32, "_PER_THREAD_BACKWARD": 8, "_TWO_AHEAD": True},
                {"_BACKWARD_WARPS": 32, "_PER_THREAD_BACKWARD": 8, "_SUM_EARLY": True},
            )
        ),
    ],
    "columns by their own": [],
    "blockwise 1x128 both": [],
    "swiglu_columns": [],
    "swiglu_columns, kept in FP8": [],
}
"""By kernel; of none, only what ships is timed."""


def kernels() -> list[Kernel]:
    return [kernel for kernel in KERNELS if kernel.name in TRIALS]


def shapes_of(kernel: Kernel) -> list[tuple[int, int]]:
    """The one of most results first: should time run out, that is there."""
    shapes = [shape for shape in SHAPES if "norm" not in kernel.name or shape[1] <= WIDEST_NORM]
    return sorted(shapes, key=lambda shape: shape != (8192, 4096))


def settings_of(kernel: Kernel) -> list[Setting]:
    """The shipped one first; each names all constants that any of them changes."""
    keys = dict.fromkeys(key for setting in TRIALS[kernel.name] for key in setting)
    first = shipped(kernel, keys)
    return [first, *(first | setting for setting in TRIALS[kernel.name])]


def label(setting: Setting, first: Setting) -> str:
    changed = [f"{key.strip('_')}={value}" for key, value in setting.items() if value != first[key]]
    return " ".join(changed) or "ships"


def check() -> None:
    """Of each setting on trial, odd shapes; two programs take three or two partial sums, the last of which is cut."""
    from fp8_ds.ops.rmsnorm import kernel, reference, triton
    from fp8_ds.testing.interpreted import pytest_configure
    from fp8_ds.testing.producers import assert_same, make_rows

    pytest_configure()  # the interpreter at twice its speed
    (norm,) = (kernel for kernel in kernels() if kernel.name == "rmsnorm_backward")
    for setting in settings_of(norm):
        few = {"_BACKWARD_WARPS": min(setting["_BACKWARD_WARPS"], 1)}
        for shape in ((70, 1500), (33, 40), (1, 1)):
            x, grad, residual = (make_rows(*shape, seed) for seed in range(3))
            if shape[0] > 40:
                x[3], grad[20, 0], x[69, 1], x[40, 2] = 0, float("nan"), float("inf"), -0.0
            weight = (torch.randn(shape[1]) + 1).bfloat16()
            for one in (None, residual):
                arguments = (grad, x, weight, reference.rstd_of(x, 1e-5), one)
                with applied(norm.module, setting | few):
                    got = triton.rmsnorm_backward(*arguments)
                for a, b in zip(reference.rmsnorm_backward(*arguments), got, strict=True):
                    assert_same(a, b)
        print(f"{norm.name}: {label(setting, settings_of(norm)[0])}: same bits", flush=True)
    for num_partials in (1, 128, 129, 512):
        partial = make_rows(num_partials, 40).float() * 1.1
        got, steps = torch.empty(40), -(-num_partials // reference.PARTIAL_LANES)
        kernel.sum_steps_kernel[(2,)](partial, got, num_partials, 40, STEPS=steps, EARLY=False, COLS=32)
        assert_same(reference.sum_partials(partial), got)
    print("sums of partials: same bits")


def compile_some(part: int, parts: int) -> None:
    """In a process of its own: what Triton compiles is in its cache afterwards."""
    jobs = [(kernel, setting) for kernel in kernels() for setting in settings_of(kernel)]
    for kernel, setting in jobs[part::parts]:
        for rows, cols in shapes_of(kernel):
            try:
                with applied(kernel.module, setting):
                    kernel.call(kernel.inputs(rows, cols, "cuda"))
            except Exception as error:  # such a setting is left out when it is timed
                print(f"{kernel.name} {setting}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                break
    torch.cuda.synchronize()


def compile_all() -> None:
    parts = min(14, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(part, parts)) for part in range(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)


def time_kernel(kernel: Kernel, rows: int, cols: int, copy: float, end: float) -> Iterator[dict[str, Any]]:
    """A row for each setting, the shipped one first; nothing once it is `end`."""
    if time.monotonic() > end:
        return
    sets = [kernel.inputs(rows, cols, "cuda")]
    size = sum(x.numel() * x.element_size() for x in _tensors(sets[0]))
    moved = kernel.bytes_per_element * rows * cols
    # Not by their size alone: the norm's inputs hold what only its backward reads.
    sets += [kernel.inputs(rows, cols, "cuda") for _ in range(int(SET_BYTES // min(size, moved)))]
    settings = settings_of(kernel)
    expected = None
    found: list[dict[str, Any]] = []
    for setting in settings:
        row: dict[str, Any] = {"kernel": kernel.name, "shape": f"{rows} x {cols}", "MiB": rows * cols >> 19,
                               "setting": setting, "label": label(setting, settings[0])}  # fmt: skip
        row["us_of_rounds"] = []
        try:
            with applied(kernel.module, setting):
                output = kernel.call(sets[0])
            expected = output if expected is None else expected
            row["same_bits"] = same_bits(expected, output)
            del output
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        found.append(row)
    copies = []
    for _ in range(ROUNDS):
        copies.append(equal_copy_ms(moved))
        for row in found:
            if "error" in row or time.monotonic() > end:
                continue
            try:
                with applied(kernel.module, row["setting"]):
                    row["us_of_rounds"].append(round(1000 * captured_ms(kernel.call, sets), 2))
            except Exception as error:  # not every launch can be captured
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    for row in found:
        if row["us_of_rounds"]:
            row["us"] = us = min(row["us_of_rounds"])
            row["share_of_copy"] = round(moved / us * 1e6 / copy, 4)
            row["share_of_equal_copy"] = round(1000 * min(copies) / us, 4)
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """By kernel and size, the fastest setting first."""
    lines = ["| kernel | MiB of bf16 | setting | us | of the copy rate | of an equal copy | to shipped | bits |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["shape"]), []).append(row)
    for (name, shape), mine in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0]["MiB"])):
        ship = mine[0].get("us", float("nan"))
        for row in sorted(mine, key=lambda row: row.get("us", float("inf"))):
            cells = [name, f"{row['MiB']} ({shape})", row["label"]]
            if "us" in row:
                bits = "same" if row["same_bits"] else "OTHER"
                shares = [f"{row[key]:.3f}" for key in ("share_of_copy", "share_of_equal_copy")]
                cells += [f"{row['us']:.2f}", *shares, f"{ship / row['us']:.3f}", bits]
            else:
                cells += [row.get("error", "not timed")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def dry() -> None:
    """Each setting applied and the op called once on CPU, not its kernel (--check). The table has no times."""
    rows = []
    for kernel in kernels():
        settings = settings_of(kernel)
        for setting in settings:
            with applied(kernel.module, setting):
                kernel.call(kernel.inputs(32, 48, "cpu"))
            rows.append({"kernel": kernel.name, "shape": "32 x 48", "MiB": 0, "setting": setting,
                         "label": label(setting, settings[0])})  # fmt: skip
    print(table(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="Settings of kernels that are on trial.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--budget", type=float, default=95, help="seconds, compiling included")
    parser.add_argument("--check", action="store_true", help="on CPU: bits of all settings in the interpreter")
    parser.add_argument("--dry", action="store_true", help="on CPU: the calls, tiny, and the table")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.check:
        check()
        return 0
    if args.dry:
        dry()
        return 0
    compile_all()
    compiled = time.monotonic() - begin
    print(f"compiled after {compiled:.0f} s", flush=True)
    copy = copy_rate()
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy / 1e9, "rows": []}  # fmt: skip
    for rows, cols in dict.fromkeys(shape for kernel in kernels() for shape in shapes_of(kernel)):
        for kernel in kernels():
            if (rows, cols) not in shapes_of(kernel):
                continue
            result["rows"] += time_kernel(kernel, rows, cols, copy, begin + args.budget)
            torch.cuda.empty_cache()
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    print(f"compiled in {compiled:.0f} s, {time.monotonic() - begin:.0f} s in all, copy {copy / 1e9:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
