"""Launch settings of the memory-bound kernels tried against those that ship: words, rows, warps of a program.

    python benchmarks/kernels_tune.py --out tune.json            # one H200; compiles on all cores, then times
    python benchmarks/kernels_tune.py --only transpose planes
    python benchmarks/kernels_tune.py --shipped                  # no other settings: the shares of the copy rate
    python benchmarks/kernels_tune.py --dry-run                  # CPU, tiny, plain torch: the calls, not the kernels

Settings are the module constants of fp8_ds/ops/*/triton.py; a setting changes them for one call. Calls are captured in
a CUDA graph over several sets of tensors, 1 GiB or more in all, so neither the host's time nor the cache's size enters.
What a better setting writes is what the shipped one writes: results are compared bit for bit.

Two shares of the copy rate: of that of 4 GiB, and of a copy of as many bytes as the kernel moves, captured in the same
way, which begins and ends as often.

A setting is worth taking if it is faster at all shapes of its kernel; the table names the best by the sum over them.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results_io import command_line, device_name
from timing import captured_ms, copy_rate
from torch import Tensor

from fp8_ds.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import quantize_blockwise, transpose_blockwise
from fp8_ds.ops.groupwise import dequantize_groupwise, quantize_groupwise
from fp8_ds.ops.observe import new_counts, observe_codes, observe_hp
from fp8_ds.ops.quantize import (
    amax,
    quantize,
    quantize_colwise_t,
    quantize_delayed_planes,
    quantize_planes,
    quantize_rowwise,
)
from fp8_ds.ops.rmsnorm import rmsnorm, rmsnorm_backward
from fp8_ds.ops.squares import SumOfSquares
from fp8_ds.ops.swiglu import swiglu, swiglu_backward_columns, swiglu_backward_fp8, swiglu_backward_kept, swiglu_columns
from fp8_ds.ops.transpose import transpose
from fp8_ds.scaling import AmaxHistory

SET_BYTES = 1 << 30
NARROW, WIDE, WEIGHT, KV = (8192, 4096), (8192, 14336), (14336, 4096), (8192, 1024)
HIDDEN_OF_70B = (8192, 8192)

Setting = dict[str, Any]
"""Constant to value; "WORDS.True" is an entry of a dict."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, called on a tensor or on several, and what is tried.

    Args:
        name: of it.
        module: below fp8_ds.ops, whose constants are set.
        tries: constant to values; all combinations that `fits` allows.
        bytes_per_element: that must move, of a bf16 or FP8 matrix.
        shapes: of the matrix.
        inputs: makes what `call` takes, for one set.
        call: of it.
        fits: whether a combination makes sense.
    """

    name: str
    module: str
    tries: dict[str, tuple[Any, ...]]
    bytes_per_element: float
    inputs: Callable[[int, int, str], Any]
    call: Callable[[Any], Any]
    shapes: tuple[tuple[int, int], ...] = (NARROW, WIDE)
    fits: Callable[[Setting], bool] = lambda setting: True

    def settings(self) -> Iterator[Setting]:
        for values in itertools.product(*self.tries.values()):
            setting = dict(zip(self.tries, values, strict=True))
            if self.fits(setting):
                yield setting


def _matrix(rows: int, cols: int, device: str) -> Tensor:
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16)


def _codes(rows: int, cols: int, device: str) -> Tensor:
    return torch.randint(0x20, 0x60, (rows, cols), device=device, dtype=torch.uint8).view(E4M3.dtype)


def _scaled(rows: int, cols: int, device: str) -> tuple[Tensor, Any]:
    return _matrix(rows, cols, device), AmaxHistory(2, [E4M3.max, E5M2.max], device=device)


def _three(rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor, Any]:
    return *(_matrix(rows, cols, device) for _ in range(3)), AmaxHistory(2, [E4M3.max, E5M2.max], device=device)


def _kept(rows: int, cols: int, device: str) -> Any:
    gate, up, grad, history = _three(rows, cols, device)
    return quantize_groupwise(gate), quantize_groupwise(up), grad, history


def _beside(x: Any) -> Any:
    return swiglu_backward_columns(
        x[2], x[0], x[1], (E4M3, E5M2), tuple(x[3].slot(k) for k in (0, 1, 1)), rounding="twice"
    )


def _delayed(x: tuple[Tensor, Any], planes: Any) -> Any:
    slot = x[1].slot(0)
    return quantize_delayed_planes(x[0], slot.scale, slot.scale_inv, slot.amax_local, E4M3, planes, record=True)


def _norm_inputs(rows: int, cols: int, device: str) -> Any:
    return (
        *_three(rows, cols, device),
        torch.ones(cols, device=device, dtype=torch.bfloat16),
        torch.ones(rows, device=device),
    )


def _block_codes(rows: int, cols: int, device: str) -> Any:
    planes = quantize_blockwise(_matrix(rows, cols, device), E4M3, (1, 128), "row")
    return planes.x_fp8, planes.scale_inv


def _tile_is_of_warps(words: str, warps: str, vectors: str = "") -> Callable[[Setting], bool]:
    """16 to 128 blocks of 16 x 4 elements for a warp (ops/transpose): fewer leave threads idle, more spill."""

    def fits(setting: Setting) -> bool:
        return 16 <= setting.get(vectors, 4) * setting[words] / setting[warps] <= 128

    return fits


def _quarter_is_of_warps(quarter: str, warps: str) -> Callable[[Setting], bool]:
    """32 to 128 elements of each tensor for a thread (ops/_tiles.py)."""
    return lambda setting: 32 <= 4 * setting[quarter] * 4 / setting[warps] <= 128


_TILES: dict[str, tuple[Any, ...]] = {"rows": (2, 4, 8, 16), "words": (8, 16, 32, 64), "warps": (1, 2, 4, 8)}
_BOTH: dict[str, tuple[Any, ...]] = {"_BOTH_QUARTER": (8, 16), "_BOTH_WARPS": (4, 8)}

KERNELS = (
    Kernel(
        "transpose",
        "transpose.triton",
        {"VECTORS": _TILES["rows"], "WORDS": _TILES["words"], "NUM_WARPS": _TILES["warps"]},
        2,
        _codes,
        transpose,
        (NARROW, WEIGHT, WIDE),
        _tile_is_of_warps("WORDS", "NUM_WARPS", "VECTORS"),
    ),
    *(
        Kernel(
            f"planes {planes}",
            "quantize.triton",
            {"PLANES_QUARTER": (8, 16, 32, 64), "PLANES_WARPS": (2, 4, 8)},
            4 if planes == "both" else 3,
            _scaled,
            lambda x, planes=planes: _delayed(x, planes),
            (NARROW, WIDE, KV),
            _quarter_is_of_warps("PLANES_QUARTER", "PLANES_WARPS"),
        )
        for planes in ("both", "col")
    ),
    Kernel(
        "planes given both",
        "quantize.triton",
        {"PLANES_QUARTER": (16, 32), "PLANES_WARPS": (4, 8)},
        4,
        _scaled,
        lambda x: quantize_planes(x[0], x[1].scale[0], E4M3, "both"),
    ),
    Kernel("rows given", "quantize.triton", {}, 3, _scaled, lambda x: quantize(x[0], x[1].scale[0], E4M3)),
    Kernel("rows by their own", "quantize.triton", {}, 3, _matrix, lambda x: quantize_rowwise(x, E4M3)),
    Kernel(
        "columns by their own",
        "quantize.triton",
        {"COLS_ROWS": (4, 8), "COLS_UNROLL": (4, 8), "COLS_TILES": (1, 2, 4), "COLS_ONCE_BYTES": (0, 64 << 20)},
        5,
        _matrix,
        lambda x: quantize_colwise_t(x, E4M3),
    ),
    Kernel(
        "amax",
        "quantize.triton",
        {"AMAX_WORDS": (4096, 8192, 16384), "AMAX_WARPS": (8, 16, 32), "AMAX_PROGRAMS": (1, 2, 3)},
        2,
        _matrix,
        amax,
        fits=lambda s: s["AMAX_WORDS"] / s["AMAX_WARPS"] <= 512 and s["AMAX_PROGRAMS"] * s["AMAX_WARPS"] <= 64,
    ),
    Kernel(
        "squares",
        "squares.triton",
        {"BLOCK": (8192, 16384, 32768), "SPAN": (1, 4, 16), "NUM_WARPS": (4, 8, 16)},
        2,
        lambda rows, cols, device: ({}, [_matrix(rows, cols, device) for _ in range(2)]),
        lambda x: _sum_of_squares(*x),
    ),
    Kernel(
        "observe codes",
        "observe.triton",
        {"CODES": (8192, 16384, 32768), "CODES_WARPS": (4, 8, 16), "SPAN": (4, 16)},
        1,
        _codes,
        lambda x: _observed(observe_codes, x, torch.ones((), device=x.device), can_saturate=True),
        (NARROW, WIDE),
        lambda s: 32 <= s["CODES"] / s["CODES_WARPS"] / 32 <= 128,
    ),
    Kernel(
        "observe numbers",
        "observe.triton",
        {"NUMBERS": (4096, 8192, 16384), "NUMBERS_WARPS": (4, 8, 16), "SPAN": (4, 16)},
        2,
        _matrix,
        lambda x: _observed(observe_hp, x),
        (NARROW, WIDE),
        lambda s: 16 <= s["NUMBERS"] / s["NUMBERS_WARPS"] / 32 <= 64,
    ),
    Kernel(
        "rmsnorm",
        "rmsnorm.triton",
        {"_PER_THREAD": (16, 32, 64), "_AHEAD_WARPS": (8, 16, 32)},
        3,
        _norm_inputs,
        lambda x: _norm(x),
        (NARROW, HIDDEN_OF_70B),
    ),
    Kernel(
        "rmsnorm_backward",
        "rmsnorm.triton",
        {"_PER_THREAD_BACKWARD": (8, 16), "_BACKWARD_WARPS": (16, 32), "_SUM_COLS": (8, 32)},
        6,
        _norm_inputs,
        lambda x: rmsnorm_backward(x[0], x[1], x[4], x[5]),
        (NARROW, HIDDEN_OF_70B),
    ),
    Kernel(
        "swiglu",
        "swiglu.triton",
        {"_BLOCK": (1024, 2048, 4096)},
        5,
        _three,
        lambda x: swiglu(x[0], x[1], E4M3, x[3].slot(0)),
        (WIDE,),
    ),
    Kernel(
        "swiglu_backward_fp8",
        "swiglu.triton",
        {"_BLOCK": (1024, 2048, 4096)},
        8,
        _three,
        lambda x: swiglu_backward_fp8(x[2], x[0], x[1], E5M2, (x[3].slot(0), x[3].slot(1))),
        (WIDE,),
    ),
    Kernel(
        "swiglu_columns",
        "swiglu.triton",
        {"_COLUMNS_QUARTER": (8, 16, 32), "_COLUMNS_WARPS": (2, 4, 8)},
        5,
        _three,
        lambda x: swiglu_columns(x[0], x[1], E4M3, x[3].slot(0), rounding="twice"),
        (WIDE,),
        _quarter_is_of_warps("_COLUMNS_QUARTER", "_COLUMNS_WARPS"),
    ),
    Kernel("swiglu_backward_columns", "swiglu.triton", _BOTH, 9, _three, _beside, (WIDE,)),
    Kernel(
        "swiglu_backward_kept",
        "swiglu.triton",
        _BOTH,
        6,
        _kept,
        lambda x: swiglu_backward_kept(x[2], x[0], x[1], E5M2, (x[3].slot(1),) * 2, rounding="twice"),
        (WIDE,),
    ),
    Kernel(
        "swiglu_columns, kept in FP8",
        "swiglu.triton",
        {"_KEPT_QUARTER": (8, 16), "_KEPT_WARPS": (4, 8)},
        3,
        _kept,
        lambda x: swiglu_columns(x[0], x[1], E4M3, x[3].slot(0), rounding="twice"),
        (WIDE,),
    ),
    Kernel(
        "swiglu_columns by a transpose",
        "swiglu.triton",
        {},
        5,
        _three,
        lambda x: transpose(swiglu(x[0], x[1], E4M3, x[3].slot(0), record=False, rounding="twice").x_fp8),
        (WIDE,),
    ),
    *(
        Kernel(
            f"blockwise {block[0]}x128 {planes}",
            "blockwise.triton",
            {"WARPS.tile": (4, 8), "_TILE_REGISTERS": (128, 168, 255)},
            4 if planes == "both" else 3,
            _matrix,
            lambda x, block=block, planes=planes: quantize_blockwise(x, E4M3, block, planes),
            fits=lambda s: s["WARPS.tile"] * 32 * s["_TILE_REGISTERS"] <= 65536,
        )
        for block, planes in (((1, 128), "both"), ((1, 128), "col"), ((128, 128), "row"), ((128, 128), "both"))
    ),
    Kernel(
        "blockwise 1x128 row",
        "blockwise.triton",
        {},
        3,
        _matrix,
        lambda x: quantize_blockwise(x, E4M3, (1, 128), "row"),
    ),
    Kernel(
        "groupwise back",
        "groupwise.triton",
        {"_ROWS": (16, 32, 64), "_NUM_WARPS": (2, 4, 8)},
        3,
        _block_codes,
        lambda x: dequantize_groupwise(*x),
        fits=lambda s: 16 <= s["_ROWS"] * 128 / s["_NUM_WARPS"] / 32 <= 64,
    ),
    Kernel(
        "blockwise transpose",
        "blockwise.triton",
        {"WARPS.tile": (2, 4, 8, 16)},
        2,
        _block_codes,
        lambda x: transpose_blockwise(*x),
        (NARROW, WEIGHT),
    ),
)


def _observed(observe: Callable[..., None], x: Tensor, *args: Tensor, **options: bool) -> Tensor:
    counts = new_counts(device=x.device)
    observe(x, *args, counts, **options)
    return counts


def _sum_of_squares(known: dict[int, SumOfSquares], xs: list[Tensor]) -> Tensor:
    """With tables of its own for each size of program."""
    from fp8_ds.ops.squares import triton  # the package is missing where there is no GPU

    return known.setdefault(triton.BLOCK * triton.SPAN, SumOfSquares())(xs)


def _norm(x: Any) -> Any:
    return rmsnorm(x[0], x[4], 1e-5, E4M3, x[3].slot(0))


@contextmanager
def applied(module: str, setting: Mapping[str, Any]) -> Iterator[None]:
    """The constants of the module are these inside."""
    target = importlib.import_module(f"fp8_ds.ops.{module}")
    before: Setting = {}
    for key, value in setting.items():
        name, _, entry = key.partition(".")
        holder: Any = getattr(target, name) if entry else vars(target)
        at: Any = {"True": True, "False": False}.get(entry, entry) if entry else name
        before[key] = (holder, at, holder[at])
        holder[at] = value
    try:
        yield
    finally:
        for holder, at, value in before.values():
            holder[at] = value


def shipped(kernel: Kernel) -> Setting:
    """The constants as they are."""
    target = importlib.import_module(f"fp8_ds.ops.{kernel.module}")
    found: Setting = {}
    for key in kernel.tries:
        name, _, entry = key.partition(".")
        value = getattr(target, name)
        found[key] = value[{"True": True, "False": False}.get(entry, entry)] if entry else value
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return (
        [tensor for one in value if one is not None for tensor in _tensors(one)]
        if isinstance(value, list | tuple)
        else []
    )


def same_bits(a: Any, b: Any) -> bool:
    pairs = list(zip(_tensors(a), _tensors(b), strict=True))
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs if x.dim()
    )


def settings_of(kernel: Kernel, only_shipped: bool) -> list[Setting]:
    """The shipped setting first."""
    first = shipped(kernel)
    return [first] if only_shipped else [first, *(setting for setting in kernel.settings() if setting != first)]


def compile_some(part: int, parts: int, names: list[str], only_shipped: bool) -> None:
    """In a process of its own: what Triton compiles is in its cache afterwards."""
    jobs = [(k, setting) for k in KERNELS if k.name in names for setting in settings_of(k, only_shipped)]
    for kernel, setting in jobs[part::parts]:
        try:
            with applied(kernel.module, setting):
                kernel.call(kernel.inputs(256, 512, "cuda"))
        except Exception as error:  # a setting that does not compile is left out when it is timed
            print(f"{kernel.name} {setting}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()


def compile_all(names: list[str], only_shipped: bool) -> None:
    parts = min(12, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(part, parts, names, only_shipped)) for part in range(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)


def equal_copy_ms(num_bytes: float) -> float:
    """Milliseconds of a copy that reads and writes `num_bytes` in all, as `captured_ms` has those of kernels."""
    size = int(num_bytes) // 2
    pairs = [
        tuple(torch.empty(2, size, dtype=torch.uint8, device="cuda")) for _ in range(max(1, SET_BYTES // size // 2))
    ]
    return captured_ms(lambda pair: pair[1].copy_(pair[0]), pairs)


def time_kernel(kernel: Kernel, copy: float, end: float, only_shipped: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each setting and shape, the shipped setting first."""
    settings = settings_of(kernel, only_shipped)
    for rows, cols in kernel.shapes:
        sets = [kernel.inputs(rows, cols, "cuda")]
        size = sum(x.numel() * x.element_size() for x in _tensors(sets[0]))
        sets += [kernel.inputs(rows, cols, "cuda") for _ in range(max(1, SET_BYTES // size) - 1)]
        moved = kernel.bytes_per_element * rows * cols * (2 if kernel.name == "squares" else 1)
        equal_ms = equal_copy_ms(moved)
        expected = None
        for setting in settings:
            if time.monotonic() > end:
                return
            row: dict[str, Any] = {"kernel": kernel.name, "shape": f"{rows} x {cols}", "setting": setting,
                                   "shipped": setting == settings[0]}  # fmt: skip
            try:
                with applied(kernel.module, setting):
                    output = kernel.call(sets[0])
                    expected = output if expected is None else expected
                    row["same_bits"] = kernel.name == "squares" or same_bits(expected, output)
                    ms = captured_ms(kernel.call, sets)
                row |= {"us": round(1000 * ms, 2), "share_of_copy": round(moved / ms * 1e3 / copy, 4)}
                row["share_of_equal_copy"] = round(equal_ms / ms, 4)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            yield row


def table(rows: list[dict[str, Any]]) -> str:
    """For each kernel the shipped setting and the three best by their sum over the shapes that all were timed at."""
    lines = ["| kernel | setting | us, shares of the copy rate and of an equal copy's, by shape |", "|---|---|---|"]
    for name in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == name and "us" in row]
        by_setting: dict[str, list[dict[str, Any]]] = {}
        for row in mine:
            by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
        most = max(map(len, by_setting.values()), default=0)
        whole = [some for some in by_setting.values() if len(some) == most]
        best = sorted(whole, key=lambda some: sum(row["us"] for row in some))
        ship = [some for some in whole if some[0]["shipped"]]
        for some in ship + [one for one in best if one not in ship][:3]:
            cells = ", ".join(
                f"{row['shape']}: {row['us']} ({row['share_of_copy']:.2f}, {row['share_of_equal_copy']:.2f})"
                for row in some
            )
            setting = " ".join(f"{key}={value}" for key, value in some[0]["setting"].items())
            flag = "**ships** " if some[0]["shipped"] else ""
            wrong = "" if all(row["same_bits"] for row in some) else " OTHER BITS"
            lines.append(f"| {name} | {flag}{setting}{wrong} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Launch settings of the memory-bound kernels.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="*", help="kernels whose name contains one of these")
    parser.add_argument("--shipped", action="store_true", help="the settings that ship, and no others")
    parser.add_argument("--budget", type=float, default=240, help="seconds")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, each call once, 1/64 of the sides")
    args = parser.parse_args()
    begin = time.monotonic()
    chosen = [k for k in KERNELS if not args.only or any(part in k.name for part in args.only)]
    if args.dry_run:
        for kernel in chosen:
            for rows, cols in kernel.shapes:
                kernel.call(kernel.inputs(rows // 64, cols // 64, "cpu"))
        print(f"{len(chosen)} kernels called")
        return 0
    compile_all([kernel.name for kernel in chosen], args.shipped)
    compiled = time.monotonic() - begin
    print(f"compiled after {compiled:.0f} s", flush=True)
    copy = copy_rate()
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy / 1e9, "rows": []}  # fmt: skip
    for kernel in chosen:
        result["rows"] += time_kernel(kernel, copy, begin + args.budget, args.shipped)
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    print(f"compiled in {compiled:.0f} s, {time.monotonic() - begin:.0f} s in all, copy {copy / 1e9:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
