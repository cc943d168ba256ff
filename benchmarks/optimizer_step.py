"""The Adam kernel alone: time, bandwidth and bytes on 2.0 B parameters of a Llama with 8 layers of Llama-3-8B's shapes.

    python benchmarks/optimizer_step.py --out step.json      # one H200
    python benchmarks/optimizer_step.py --dry-run            # CPU, tiny, plain torch
    python benchmarks/optimizer_step.py --arms "e4m11, FP8 weights only" --launches "16,32,4 16,32,4,96 16,16,8"

What must move is every byte of gradient, master, moments and their scales that a step reads, and every one that it
writes. The copy rate is torch's `copy_` of 4 GiB in the same run, read and write counted.

Prediction, written before the first run on an H200: 10.06 B per FP8 element move in the arm "e4m11"; at 80 % of a copy
of 4.27 TB/s the step takes 6.1 ms. The fp32 arm moves half as much again and is closer to the copy rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from adam_shards import make_inputs
from results_io import command_line, device_name
from timing import copy_rate, median_ms
from torch import Tensor

from fp8_ds.ops.adamw import AdamShard, StepInputs, prepare
from fp8_ds.optim.masters import BF16_8, BY_NAME, FP32, MasterFormat
from fp8_ds.optim.moments import GROUP

LAYERS, HIDDEN, KV, FFN, VOCAB = 8, 4096, 1024, 14336, 32000
ARMS = {"e4m11": True, "e4m19": True, "fp32": True, "e4m11, FP8 weights only": False}
"""Name of the arm, which starts with its master format: whether embedding, head and norms take part."""

LAUNCHES = [
    "4,4,1",
    "4,8,1",
    "4,2,1",
    "8,4,2",
    "8,8,2",
    "8,2,2",
    "16,4,4",
    "16,16,4,96",
    "8,4,2,112",
    "32,16,8",
    "16,8,8",
]
"""Tried by `--launches sweep`: rows, tiles, warps and most registers of a program, for the master format of the arm."""


def shapes(divisor: int) -> tuple[list[int], list[int]]:
    """Elements of the linear weights, and of the others; `divisor` shrinks both sides of the matrices."""
    hidden, kv, ffn, vocab = HIDDEN // divisor, KV // divisor, FFN // divisor, VOCAB // divisor
    layer = [hidden * hidden, kv * hidden, kv * hidden, hidden * hidden, ffn * hidden, ffn * hidden, hidden * ffn]
    return layer * LAYERS, [vocab * hidden] * 2 + [hidden] * (2 * LAYERS + 1)


def make(numel: int, index: int, fmt: MasterFormat, device: str) -> AdamShard:
    """A shard in mid-training, filled where it lies; its moments fit the gradients of `gradient`."""
    groups = -(-numel // GROUP)
    hi = torch.empty(numel, dtype=fmt.hi_dtype, device=device)
    if fmt.is_fp8:
        hi.random_(0x28, 0x60)
        hi[1::2] |= 0x80
    else:
        hi.normal_(0, 0.02)
    shard = AdamShard(f"weight{index}", numel, 0, index, 0, 0, fmt, hi)
    if fmt.is_split:
        shard.lo = torch.empty(groups * GROUP, dtype=fmt.lo_dtype, device=device).random_(-100, 100)
    shard.m = torch.empty(groups * GROUP, dtype=torch.uint8, device=device).random_(0x20, 0x70)
    shard.v = torch.empty(groups * GROUP, dtype=torch.uint8, device=device).random_(0x80, 0xE0)
    shard.m_scale_inv = torch.full((groups,), 1e-8, device=device)
    shard.v_scale_inv = torch.full((groups,), 2e-8, device=device)
    return shard


def gradient(shard: AdamShard) -> Tensor:
    return torch.empty(shard.numel, dtype=torch.bfloat16, device=shard.hi.device).normal_(0, 1e-6)


def moved_bytes(shard: AdamShard, grad: Tensor) -> int:
    """Read once: gradient, master, moments, scales; written once: all but the gradient."""
    state = shard.fmt.num_bytes * shard.numel + 2 * shard.numel + 8 * shard.num_groups
    return grad.numel() * grad.element_size() + 2 * state


def resident_bytes(shards: list[AdamShard]) -> int:
    tensors = [t for s in shards for t in (s.hi, s.lo, s.m, s.v, s.m_scale_inv, s.v_scale_inv) if t is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def inputs_of(device: str) -> StepInputs:
    inputs = make_inputs(device=device)
    inputs.next_scale_inv = inputs.scale_inv
    return inputs


def run_arm(arm: str, with_others: bool, device: str, divisor: int, copy: float | None) -> dict[str, Any]:
    fmt = BY_NAME[arm.split(",")[0]]
    linear, others = shapes(divisor)
    kinds = [(numel, fmt) for numel in linear]
    if with_others:
        kinds += [(numel, BF16_8 if fmt.is_split else FP32) for numel in others]
    shards = [make(numel, index, kind, device) for index, (numel, kind) in enumerate(kinds)]
    grads = [gradient(shard) for shard in shards]
    step, inputs = prepare(shards), inputs_of(device)
    params = sum(shard.numel for shard in shards)
    moved = sum(moved_bytes(shard, grad) for shard, grad in zip(shards, grads, strict=True))
    resident = resident_bytes(shards)
    row = {"arm": arm, "parameters": params, "moved_bytes_per_parameter": moved / params,
           "resident_bytes_per_parameter": resident / params}  # fmt: skip
    step(grads, inputs)
    if device == "cpu":
        return row
    assert copy is not None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(grads, inputs)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    ms = median_ms(lambda: step(grads, inputs))
    rate = moved / ms * 1e3
    return row | {"ms": ms, "GB_per_s": rate / 1e9, "share_of_copy": rate / copy, "peak_of_step_extra_bytes": extra,
                  "allocated_bytes_per_parameter_with_gradients": before / params}  # fmt: skip


def set_launch(arm: str, launch: str | None) -> None:
    if launch is not None:
        from fp8_ds.ops.adamw import triton  # the package is missing where there is no GPU

        triton.LAUNCHES[arm.split(",")[0]] = triton.Launch(*map(int, launch.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of the Adam kernel on 2.0 B parameters.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument(
        "--launches", help="rows,tiles,warps[,registers] ..., each tried on every arm; 'sweep': the known"
    )
    parser.add_argument("--dry-run", action="store_true", help="on CPU with 1/64 of the sides")
    args = parser.parse_args()
    device, divisor = ("cpu", 64) if args.dry_run else ("cuda", 1)
    copy = None if args.dry_run else copy_rate()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {"command": command_line(), "device": device_name(), "torch": torch.__version__,
                              "copy_GB_per_s": copy and copy / 1e9, "arms": []}  # fmt: skip
    print("copy", result["copy_GB_per_s"])
    launches = LAUNCHES if args.launches == "sweep" else (args.launches or "").split() or [None]
    for arm, launch in itertools.product(args.arms.split(";"), launches):
        set_launch(arm, launch)
        result["arms"].append(run_arm(arm, ARMS[arm], device, divisor, copy) | {"launch": launch})
        print(json.dumps(result["arms"][-1]), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
