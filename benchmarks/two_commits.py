"""Step time and peak memory of two commits of fp8_ds, in turns on one machine: does a change make a step slower?

    mkdir old && git archive OLD fp8_ds | tar x -C old
    python benchmarks/two_commits.py --old old --out benchmarks/results

Each process trains one commit in ZeRO-2 and ZeRO-3, with fp32 states, with FP8 states and with gradient release. They
alternate. Step ms: until the device has ended a step; host ms: until the host has launched it. The new commit holds if
its median is within 1 % of the old one's, or within the spread of the old commit's processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from processes import error_of, run_logged
from results_io import dated_stem, heading

from fp8_ds.host import free_port

ROOT = Path(__file__).resolve().parents[1]
STATES = {
    "fp32": {},
    "e4m11": {"optimizer": {"states": "fp8", "master": "e4m11"}},
    "release": {"optimizer": {"states": "fp8", "master": "e4m11", "release": True}},
}
WAYS = tuple(f"ZeRO-{stage} {states}" for stage in (2, 3) for states in STATES)
NUMBERS = ("step ms", "host ms", "peak MiB")
TOLERANCE = 0.01
NUM_WARM = 5


def ds_config(way: str) -> dict[str, Any]:
    stage, states = way.removeprefix("ZeRO-").split()
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0 if states == "release" else 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "fp8": {"enabled": True, "preset": None, "linear": {"min_size": 0}, **STATES[states]},
    }


def measure(way: str, width: int, num_layers: int, tokens: int, num_steps: int) -> dict[str, float]:
    """Return medians of a step, and the peak, of a stack of MLPs in bf16."""
    import deepspeed
    import torch
    from torch import nn

    on_cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_layers)
    ]
    engine = deepspeed.initialize(model=nn.Sequential(*blocks), config=ds_config(way))[0]
    x = torch.randn(tokens, width, device=engine.device, dtype=torch.bfloat16)
    found: dict[str, list[float]] = {name: [] for name in NUMBERS[:2]}
    for step in range(num_steps):
        if on_cuda and step == NUM_WARM:
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        launched = time.perf_counter()
        wait()
        if step >= NUM_WARM:
            found["host ms"].append(1e3 * (launched - began))
            found["step ms"].append(1e3 * (time.perf_counter() - began))
    assert torch.isfinite(loss), way
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else 0.0
    engine.destroy()
    del engine, loss
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return {**{name: statistics.median(values) for name, values in found.items()}, "peak MiB": peak}


def worker(args: argparse.Namespace) -> None:
    """Measure all ways with the fp8_ds that is first on the path, and print a line of JSON for each."""
    import fp8_ds

    assert Path(fp8_ds.__file__).resolve().is_relative_to(Path(args.worker).resolve()), fp8_ds.__file__
    for way in args.ways:
        row = measure(way, args.width, args.layers, args.tokens, args.steps)
        print("ROW", json.dumps({"way": way, **row}), flush=True)


def run(package: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return what a process with this commit's package measures, by way."""
    package = package.resolve()
    sizes = ("width", "layers", "tokens", "steps")
    command = [sys.executable, __file__, "--worker", str(package), "--ways", *args.ways]
    command += [text for name in sizes for text in (f"--{name}", str(getattr(args, name)))]
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    code, output, _ = run_logged(str(package), command, args.timeout, None, env=env)
    rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    if code or len(rows) < len(args.ways):
        raise SystemExit(f"{package}: {error_of(code, output, args.timeout)}")
    return {row.pop("way"): row for row in rows}


def table(old: list[dict[str, Any]], new: list[dict[str, Any]], ways: list[str]) -> str:
    """Return lines of medians, the old one's spread, and whether the new one holds."""
    lines = ["| | | old | its spread | new | new / old | holds |", "|---|---|---|---|---|---|---|"]
    for way in ways:
        for name in NUMBERS:
            before, after = ([one[way][name] for one in runs] for runs in (old, new))
            was, now = statistics.median(before), statistics.median(after)
            ratio = now / was if was else 1.0
            holds = ratio <= 1 + TOLERANCE or now <= max(before)
            spread = f"{min(before):.1f} to {max(before):.1f}"
            lines.append(
                f"| {way} | {name} | {was:.1f} | {spread} | {now:.1f} | {ratio:.3f} | {'yes' if holds else '**no**'} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="folder that has the old commit's fp8_ds")
    parser.add_argument("--new", type=Path, default=ROOT, help="folder that has the new one's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if args.old is None:
        parser.error("--old: expected a folder that has the old commit's fp8_ds, got none")
    runs: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for number in range(args.rounds):
        for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
            runs[name].append(run(getattr(args, name), args))
            print(number, name, runs[name][-1], flush=True)
            text = table(runs["old"], runs["new"], args.ways) if all(runs.values()) else ""
            if args.out and text:  # after each round: a machine may go
                stem = dated_stem(args.out, "two-commits")
                stem.with_suffix(".md").write_text(heading("Two commits in turns") + text)
                stem.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
