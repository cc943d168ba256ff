"""Times of the memory-bound kernels beside copies, and other launch settings tried against those that ship.

    python benchmarks/kernels_tune.py --out tune.json            # one H200; compiles on all cores, then times
    python benchmarks/kernels_tune.py --only transpose blockwise
    python benchmarks/kernels_tune.py --shipped                  # no other settings: the shares of the copy rate
    python benchmarks/kernels_tune.py --dry-run                  # CPU, tiny, plain torch: the calls, not the kernels

The kernels, and what is tried for each: kernels_tune_cases.py. Settings are the module constants of
fp8_ds/ops/*/triton.py; a setting changes them for one call. Calls are captured in a CUDA graph over several sets of
tensors, 1 GiB or more in all, so neither the host's time nor the cache's size enters. What a better setting writes is
what the shipped one writes: results are compared bit for bit.

Two shares of the copy rate: of that of 4 GiB, and of a copy of as many bytes as the kernel moves, captured in the same
way, which begins and ends as often.

A setting is worth taking if it is faster at all shapes of its kernel; the table names the best by the sum over them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernels_tune_cases import KERNELS, Kernel, Setting
from results_io import command_line, device_name
from timing import captured_ms, copy_rate
from torch import Tensor

SET_BYTES = 1 << 30


def _place(kernel: Kernel, key: str) -> tuple[Any, Any]:
    """The dict in which a constant lies, and its key there; "WARPS.tile" is an entry of a dict."""
    target = importlib.import_module(f"fp8_ds.ops.{kernel.module}")
    name, _, entry = key.partition(".")
    return (getattr(target, name), entry) if entry else (vars(target), name)


@contextmanager
def applied(kernel: Kernel, setting: Setting) -> Iterator[None]:
    """The constants of the kernel's module are these inside."""
    before = shipped(kernel)
    _set(kernel, setting)
    try:
        yield
    finally:
        _set(kernel, before)


def _set(kernel: Kernel, setting: Setting) -> None:
    for key, value in setting.items():
        holder, at = _place(kernel, key)
        holder[at] = value


def shipped(kernel: Kernel) -> Setting:
    """The constants as they are."""
    places = {key: _place(kernel, key) for key in kernel.tries}
    return {key: holder[at] for key, (holder, at) in places.items()}


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


def compile_one(job: tuple[str, Setting]) -> None:
    """In a process of its own: what Triton compiles is in its cache afterwards."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == job[0])
    try:
        with applied(kernel, job[1]):
            kernel.call(kernel.inputs(256, 512, "cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # a setting that does not compile is left out when it is timed
        print(f"{job}: {type(error).__name__}", flush=True)


def compile_all(kernels: Iterable[Kernel], only_shipped: bool) -> None:
    jobs = [(kernel.name, setting) for kernel in kernels for setting in settings_of(kernel, only_shipped)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def equal_copy_ms(num_bytes: float) -> float:
    """Milliseconds of a copy that reads and writes `num_bytes` in all, as `captured_ms` has those of kernels."""
    size = int(num_bytes) // 2
    pairs = [
        tuple(torch.empty(2, size, dtype=torch.uint8, device="cuda")) for _ in range(max(1, SET_BYTES // size // 2))
    ]
    return captured_ms(lambda pair: pair[1].copy_(pair[0]), pairs)


def time_kernel(kernel: Kernel, copy: float, only_shipped: bool = False) -> Iterator[dict[str, Any]]:
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
            row: dict[str, Any] = {"kernel": kernel.name, "shape": f"{rows} x {cols}", "setting": setting,
                                   "shipped": setting == settings[0]}  # fmt: skip
            try:
                with applied(kernel, setting):
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Launch settings of the memory-bound kernels.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="*", help="kernels whose name contains one of these")
    parser.add_argument("--shipped", action="store_true", help="the settings that ship, and no others")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, each call once, 1/64 of the sides")
    args = parser.parse_args()
    chosen = [k for k in KERNELS if not args.only or any(part in k.name for part in args.only)]
    if args.dry_run:
        for kernel in chosen:
            for rows, cols in kernel.shapes:
                kernel.call(kernel.inputs(rows // 64, cols // 64, "cpu"))
        print(f"{len(chosen)} kernels called")
        return
    compile_all(chosen, args.shipped)
    copy = copy_rate()
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy / 1e9, "rows": []}  # fmt: skip
    for kernel in chosen:
        result["rows"] += time_kernel(kernel, copy, args.shipped)
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    print(f"copy {copy / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
