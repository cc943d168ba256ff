"""FP8 against bf16 on the demo model with paired seeds: same data, same initial weights. Writes a dated result file.

    python benchmarks/demo_parity.py --seeds 0 1 2 --steps 300

Prediction: the held-out loss of FP8 differs from bf16's by less than 0.5 % relative in the mean over seeds, and seeds
differ among themselves by more than that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp8_ds.device import uses_cuda
from fp8_ds.launcher import free_port, which_gpus

HERE = Path(__file__).parent
ROOT = HERE.parent
ARMS = {"bf16": "ds_zero3_bf16", "fp8": "ds_zero3_fp8"}


def train_once(arm: str, seed: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """Losses by step and the held-out loss of one run of examples/deepspeed/train.py."""
    log = args.out / f".parity-{arm}-{seed}.jsonl"
    script = ROOT / "examples/deepspeed/train.py"
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *which_gpus(args.ranks)]
    command += ["--master_port", str(free_port()), str(script)]
    command += ["--deepspeed_config", str(ROOT / f"configs/{ARMS[arm]}.json"), "--log", str(log)]
    command += ["--size", args.size, "--steps", str(args.steps), "--seed", str(seed), "--held-out-batches", "32"]
    command += ["--seq-len", str(args.seq_len)]
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
    *steps, last = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    return [step["loss"] for step in steps], last["held_out_loss"]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Both arms for every seed; relative differences of the held-out loss, FP8 minus bf16."""
    jobs = [(arm, seed) for seed in args.seeds for arm in ARMS]
    with ThreadPoolExecutor(args.parallel) as pool:
        done = dict(zip(jobs, pool.map(lambda job: train_once(*job, args), jobs), strict=True))
    runs = {arm: {seed: done[arm, seed] for seed in args.seeds} for arm in ARMS}
    relative = [(runs["fp8"][s][1] - runs["bf16"][s][1]) / runs["bf16"][s][1] for s in args.seeds]
    return {
        "held_out": {arm: {str(s): run[1] for s, run in by_seed.items()} for arm, by_seed in runs.items()},
        "curves": {arm: {str(s): run[0] for s, run in by_seed.items()} for arm, by_seed in runs.items()},
        "relative_difference": relative,
        "mean_relative_difference": statistics.fmean(relative),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for arm, color in (("bf16", "tab:blue"), ("fp8", "tab:orange")):
        for number, losses in enumerate(result["curves"][arm].values()):
            axes.plot(losses, color=color, linewidth=0.8, alpha=0.8, label=arm if number == 0 else None)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title="Paired seeds, ZeRO-3")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--size", default="small")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, on the same devices")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    import torch

    if not uses_cuda():
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    args.out.mkdir(parents=True, exist_ok=True)
    result = compare(args)
    device = torch.cuda.get_device_name() if uses_cuda() else "cpu"
    head = {"command": " ".join(sys.argv), "device": device, "torch": torch.__version__, "steps": args.steps}
    stem = args.out / f"{datetime.date.today():%Y-%m-%d}-demo-parity"
    stem.with_suffix(".json").write_text(json.dumps({**head, **result}))
    plot(result, stem.with_suffix(".png"))
    lines = [f"# {stem.name}", "", f"`{head['command']}` on {device}, torch {torch.__version__}", ""]
    lines += ["| seed | bf16 held-out | FP8 held-out | relative difference |", "|---|---|---|---|"]
    for seed, relative in zip(args.seeds, result["relative_difference"], strict=True):
        bf16, fp8 = (result["held_out"][arm][str(seed)] for arm in ARMS)
        lines.append(f"| {seed} | {bf16:.4f} | {fp8:.4f} | {100 * relative:+.2f} % |")
    lines.append(f"\nMean relative difference: {100 * result['mean_relative_difference']:+.3f} %")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
