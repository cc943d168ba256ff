"""The table of measured layer times that ships for a device: what `"layer_choice": "measured"` reads.

    python benchmarks/layer_table.py                                               # for this machine
    python benchmarks/layer_table.py --out fp8_ds/nn/tables/nvidia-h200.json       # one H200; remove the old one first
    python benchmarks/layer_table.py --dry-run --out table.json                    # CPU, tiny; no table to ship

Each row is what one linear, forward and backward, takes GPU and host, in FP8 and in bf16 (fp8_ds/nn/measure.py). Rows
are written as they come: a run that is stopped goes on where it was. docs/layer-choice.md says how they are used.

Prediction, written before the first run on an H200: at 8192 tokens [14336, 4096] and [4096, 14336] gain, all of GPT-2's
loses at up to 4096 tokens, and the tie lies near K N M = 2e11. Measured on 2026-11-23, the slower of GPU and host for
each row (results/2026-11-23-layer-table.*): so it is, and the host takes 1.25 ms for an FP8 linear, 0.22 for one in
bf16. Predicted for the GPU alone: [4096, 4096] at 8192 tokens 620 against 1100 us, [1024, 4096] 220 against 280;
measured 699 against 1025, and 245 against 268.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from fp8_ds.config import LinearConfig
from fp8_ds.nn.layer_table import Case, LayerTable, Machine, cache_file
from fp8_ds.nn.measure import Step, Taken, time_case

LLAMA_8B = [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]
LLAMA_7B = [(4096, 4096), (4096, 11008), (11008, 4096)]
LLAMA_70B = [(8192, 8192), (8192, 1024), (8192, 28672), (28672, 8192)]
LLAMA_1B = [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)]
QWEN_7B = [(3584, 3584), (3584, 512), (3584, 18944), (18944, 3584)]
GPT_2 = [(768, 768), (768, 2304), (768, 3072), (3072, 768)]
SHAPES = sorted({*LLAMA_8B, *LLAMA_7B, *LLAMA_70B, *LLAMA_1B, *QWEN_7B, *GPT_2})
"""(in, out) of linears."""
BIASED = sorted({*GPT_2, *QWEN_7B[:2]})
TOKENS = [512 << i for i in range(7)]
RECIPES: tuple[str, ...] = get_args(LinearConfig.model_fields["recipe"].annotation)


def make_cases(recipes: Sequence[str], divisor: int) -> Iterator[Case]:
    """With the `grad_dtype` that each recipe has by default."""
    for recipe in recipes:
        grad_dtype = LinearConfig.model_validate({"recipe": recipe}).grad_dtype
        for bias, shapes in ((False, SHAPES), (True, BIASED)):
            for k, n in shapes:
                for m in TOKENS:
                    key = {"recipe": recipe, "grad_dtype": grad_dtype, "backend": "torch", "bias": bias}
                    yield Case(**key, m=m // divisor, k=k // divisor, n=n // divisor)


def host_clock(steps: Sequence[Step]) -> list[Taken]:
    """For the dry run: one call each, on the host, which is the device."""
    found = []
    for step in steps:
        step()
        begin = time.perf_counter()
        step()
        found.append(Taken(*[(time.perf_counter() - begin) * 1e6] * 2))
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the layer table of this device.")
    where = (
        "JSON file to write, or to go on with; without it the one in the cache, which is read before those that ship"
    )
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after these; the next run goes on")
    parser.add_argument("--dry-run", action="store_true", help="on CPU with 1/64 of the sides")
    args = parser.parse_args()
    if args.dry_run and args.out is None:
        parser.error("--dry-run needs --out: its rows are none to choose layers by")
    return args


def main() -> int:
    args = parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    how: dict[str, Any] = {"clock": host_clock} if args.dry_run else {}
    machine = Machine.of(device)
    out: Path = args.out or cache_file(machine)
    table = LayerTable.read(out) if out.exists() else LayerTable(machine)
    if table.machine != machine:
        raise SystemExit(f"--out: expected a table of {machine!r}, got one of {table.machine!r}. Name another file.")
    cases = list(dict.fromkeys(make_cases(args.recipes, 64 if args.dry_run else 1)))
    left = [case for case in cases if case not in table.times]
    print(f"{machine.describe()}: {len(left)} of {len(cases)} rows to measure", flush=True)
    end = time.monotonic() + 60 * args.minutes
    for case in left:
        if time.monotonic() > end:
            print("out of time: run again to go on")
            break
        table.add({case: time_case(case, device, **how)})
        table.write(out)
        found = table.times[case]
        launched = f"launched in {found.fp8_host_us:.0f}, {found.bf16_host_us:.0f} us"
        verdict = f"{found.verdict(found.fp8_is_faster)}; {launched}"
        print(f"{case.recipe} {case.grad_dtype} M {case.m} {case.describe()}: {verdict}", flush=True)
    known = [table.times[case] for case in cases if case in table.times]
    print(f"{sum(found.fp8_is_faster for found in known)} of {len(known)} rows are faster in FP8: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
