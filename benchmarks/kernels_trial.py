"""Ways to make the four slowest kernels faster, beside those that ship and a copy of as many bytes; one table.

    python benchmarks/kernels_trial.py --out trial.json      # one H100 or H200; compiles on all cores, then times
    python benchmarks/kernels_trial.py --check               # CPU, Triton's interpreter: the bits of the references
    python benchmarks/kernels_trial.py --dry                 # CPU: the ops' calls, tiny, and the table without times

The method is that of kernels_tune.py, whose kernels these are: constants of fp8_ds/ops/*/triton.py that are others for
one call, CUDA graphs over 1 GiB of inputs. Each setting is timed in two rounds, the shipped one with them; the smaller
time counts, and both are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if {"--check", "--dry"} & set(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton looks at when it is imported

import torch
from kernels_tune import KERNELS, SET_BYTES, Kernel, Setting, _tensors, applied, equal_copy_ms, same_bits, shipped
from results_io import command_line, device_name
from timing import captured_ms, copy_rate
from torch import Tensor

from fp8_ds.formats import E4M3, E5M2
from fp8_ds.ops._producer import mode_of
from fp8_ds.ops.groupwise import quantize_groupwise

SHAPES = ((8192, 2048), (8192, 4096), (8192, 8192), (8192, 14336), (16384, 8192))
"""32, 64, 128, 224 and 256 MiB of bf16."""
WIDEST_NORM = 8192
"""Columns: wider rows are no model's hidden size."""
ROUNDS = 2


def _trials(*settings: Setting, **common: Any) -> list[Setting]:
    return [common | setting for setting in settings]


TRIALS: dict[str, list[Setting]] = {
    "rmsnorm": [
        {"_EARLY": True},
        {"_EARLY": True, "_REGISTERS": 72},
        {"_REGISTERS": 64},
        {"_EARLY": True, "_PER_THREAD": 16},
        {"_PER_THREAD": 32, "_AHEAD_WARPS": 16, "_REGISTERS": 128},
        {"_PER_THREAD": 16, "_AHEAD_WARPS": 32, "_REGISTERS": 64},
        {"_PER_THREAD": 16, "_AHEAD_WARPS": 24, "_REGISTERS": 80},
        {"_PER_THREAD": 64, "_AHEAD_WARPS": 8},
    ],
    "columns by their own": [
        {"COLS_TILES": 2},
        {"COLS_BACKWARDS": True},
        *_trials(
            {},
            {"COLS_TILES": 6},
            {"COLS_TILES": 2},
            {"COLS_PARTIALS": 16},
            {"COLS_PARTIALS": 32},
            COLS_BACKWARDS=True,
            COLS_ONCE=True,
        ),
    ],
    "blockwise 1x128 both": [
        {"WARPS.tile": 8, "_TILE_REGISTERS": 80},
        *_trials(
            {"_PAIRS_REGISTERS": 168, "_PAIRS_COLUMNS_FIRST": True},
            {"_PAIRS_REGISTERS": 128, "_PAIRS_COLUMNS_FIRST": True},
            {"_PAIRS_REGISTERS": 128, "_PAIRS_COLUMNS_FIRST": True, "_PAIRS_GROUP": 8},
            {"_PAIRS_REGISTERS": 128},
            {"_PAIRS_REGISTERS": 96},
            {"_PAIRS_REGISTERS": 64, "_PAIRS_WARPS": 8},
            {"_PAIRS_REGISTERS": 80, "_PAIRS_WARPS": 8},
            {"_PAIRS_REGISTERS": 80, "_PAIRS_WARPS": 8, "_PAIRS_COLUMNS_FIRST": True},
            _PAIRS=True,
        ),
    ],
    "swiglu_columns, kept in FP8": [
        {"_KEPT_QUARTER": 16, "_KEPT_WARPS": 4, "_KEPT_PACKED": 1},
        {"_KEPT_QUARTER": 8, "_KEPT_WARPS": 2, "_KEPT_PACKED": 1},
        {"_KEPT_QUARTER": 8, "_KEPT_WARPS": 4, "_KEPT_PACKED": 1},
        *(
            {"_KEPT_QUARTER": quarter, "_KEPT_WARPS": warps, "_KEPT_PACKED": 2}
            for quarter, warps in ((16, 4), (16, 8), (8, 2), (8, 4), (32, 8))
        ),
    ],
}


def kernels() -> list[Kernel]:
    return [kernel for kernel in KERNELS if kernel.name in TRIALS]


def shapes_of(kernel: Kernel) -> list[tuple[int, int]]:
    """The one of most results first: should time run out, that is there."""
    shapes = [shape for shape in SHAPES if kernel.name != "rmsnorm" or shape[1] <= WIDEST_NORM]
    return sorted(shapes, key=lambda shape: shape != (8192, 4096))


def settings_of(kernel: Kernel) -> list[Setting]:
    """The shipped one first; each names all constants that any of them changes."""
    keys = dict.fromkeys(key for setting in TRIALS[kernel.name] for key in setting)
    first = shipped(kernel, keys)
    return [first, *(first | setting for setting in TRIALS[kernel.name])]


def label(setting: Setting, first: Setting) -> str:
    changed = [f"{key.strip('_')}={value}" for key, value in setting.items() if value != first[key]]
    return " ".join(changed) or "ships"


# Bits, in the interpreter: odd shapes, and some that are cut into whole tiles.


def _check_rmsnorm() -> None:
    from fp8_ds.ops.rmsnorm import reference, triton
    from fp8_ds.testing.producers import assert_same, make_rows, make_scaling

    for shape in ((3, 1500), (70, 1024), (1, 1)):  # 70: programs that load ahead take several rows
        x = make_rows(*shape)
        if shape[0] > 6:
            x[2, 3], x[4, 5] = float("nan"), float("inf")
        weight = (torch.randn(shape[1]) + 1).bfloat16()
        for scaling, fmt, twice in (("given", E4M3, False), ("given", E5M2, True), ("rowwise", E4M3, True)):
            results = []
            for function, extra in ((reference.rmsnorm, ()), (triton.rmsnorm, (True,))):
                mode, slot = mode_of(make_scaling(scaling))
                arguments = (x, weight, 1e-5, mode, slot, True, fmt.dtype, fmt.max, twice, *extra)
                results.append([*function(*arguments), *([slot.amax_local] if scaling == "given" else [])])
            for expected, got in zip(*results, strict=True):
                assert_same(expected, got)


def _check_columns() -> None:
    from fp8_ds.ops.quantize import reference, triton
    from fp8_ds.testing import many_scales

    for shape, dtype in (((300, 70), torch.bfloat16), ((256, 256), torch.bfloat16), ((5, 17), torch.float32)):
        x = many_scales("per_row", *shape).to(dtype)
        fold = torch.rand(shape[0]) + 0.5
        for one in (None, fold):
            arguments = (x, one, E4M3.dtype, E4M3.max)
            _assert_all_same(reference.quantize_colwise_t(*arguments), triton.quantize_colwise_t(*arguments))


def _check_blockwise() -> None:
    from fp8_ds.ops.blockwise import reference, triton
    from fp8_ds.testing import many_scales

    whole = many_scales("per_tile", 384, 256).bfloat16()
    whole[3, 7], whole[140, 200], whole[300, 5] = float("nan"), float("inf"), 2.0**-130
    whole[:, 130] = 0
    for x in (whole, whole[:256, 128:], many_scales("per_tile", 150, 130).bfloat16()):
        for fmt in (E4M3, E5M2):
            arguments = (x, fmt.dtype, fmt.max, 1, True, True)
            _assert_all_same(reference.quantize_blockwise(*arguments), triton.quantize_blockwise(*arguments))


def _check_kept() -> None:
    from fp8_ds.ops.groupwise import reference as groups
    from fp8_ds.ops.swiglu import triton
    from fp8_ds.testing.producers import make_gate, make_scaling

    for shape in ((70, 130), (64, 128)):
        gate, up = (quantize_groupwise(make_gate(*shape, seed)) for seed in (1, 2))
        mode, slot = mode_of(make_scaling("given"))
        rest = (mode, slot, None, E4M3.dtype, E4M3.max, True)
        bf16 = [groups.dequantize_groupwise(*one) for one in (gate, up)]
        expected = triton.swiglu_columns(*bf16, None, *rest)  # whose own reference bounds it; exp is not exact
        got = triton.swiglu_columns(gate[0], up[0], (gate[1], up[1]), *rest)
        _assert_all_same(expected, got)


def _assert_all_same(expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    from fp8_ds.testing.producers import assert_same

    for a, b in zip(expected, got, strict=True):
        assert a.stride() == b.stride()
        assert_same(a, b)


CHECKS: dict[str, Callable[[], None]] = {
    "rmsnorm": _check_rmsnorm,
    "columns by their own": _check_columns,
    "blockwise 1x128 both": _check_blockwise,
    "swiglu_columns, kept in FP8": _check_kept,
}


def check() -> None:
    from fp8_ds.testing.interpreted import pytest_configure

    pytest_configure()  # the interpreter at twice its speed
    for kernel in kernels():
        settings = settings_of(kernel)
        seen: list[Setting] = []
        for setting in settings:
            if any(_same_in_interpreter(setting, one) for one in seen):
                continue
            seen.append(setting)
            with applied(kernel.module, setting):
                CHECKS[kernel.name]()
            print(f"{kernel.name}: {label(setting, settings[0])}: same bits", flush=True)


def _same_in_interpreter(a: Setting, b: Setting) -> bool:
    """Warps and registers, and how many elements a thread has, are nothing to the interpreter."""
    hidden = ("WARPS", "REGISTERS", "_PER_THREAD")
    parts = [{k: v for k, v in one.items() if not k.endswith(hidden) or k == "_AHEAD_WARPS"} for one in (a, b)]
    for part in parts:
        if "_AHEAD_WARPS" in part:
            part["_AHEAD_WARPS"] = bool(part["_AHEAD_WARPS"])
    return parts[0] == parts[1]


# Times.


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
            if "error" not in row and time.monotonic() < end:
                with applied(kernel.module, row["setting"]):
                    row["us_of_rounds"].append(round(1000 * captured_ms(kernel.call, sets), 2))
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
    parser = argparse.ArgumentParser(description="Ways to make the four slowest kernels faster.")
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
