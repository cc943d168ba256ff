"""FP8 beside bf16: trains the same model twice under the deepspeed launcher and shows what differs.

    python examples/deepspeed/demo.py                         # what `make demo` runs: minutes on two CPU cores
    python examples/deepspeed/demo.py --size 1b --steps 300   # on GPUs

Both runs are ZeRO-3 with the same data and seed: configs/ds_zero3_fp8.json, then configs/ds_zero3_bf16.json.
The preset of the former computes in FP8 but for the last 3 % of the steps; bytes are those of the step in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from model import SIZES
from rich.console import Console
from rich.table import Table

from fp8_ds.config.presets import MIN_STEPS
from fp8_ds.host import free_port, num_gpus, uses_cuda, which_gpus
from fp8_ds.tools.doctor.diagnosis import abandoned, build_root

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
RUNS = {"FP8": CONFIGS / "ds_zero3_fp8.json", "bf16": CONFIGS / "ds_zero3_bf16.json"}
# Of everything that a launcher and its ranks print, what the demo shows; the rest goes to the log file.
LAST = 10
"""Steps whose mean is the loss of the table."""
SHOWN = re.compile(r"^(step |held-out)|\bfp8: ")


@dataclass(frozen=True)
class Result:
    losses: list[float]
    held_out: float
    tokens_per_s: float
    report: dict[str, float]

    @property
    def final_loss(self) -> float:
        """Mean over the last steps, for one batch is noisy."""
        return statistics.fmean(self.losses[-LAST:])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--steps", type=int, help="default: 100, or 20 on a CPU without bf16 arithmetic")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=0, help="default: 2, or 1 where there is one GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".out/demo"), help="folder for logs, metrics and the plot")
    return parser.parse_args()


def bf16_is_emulated() -> bool:
    """Whether a thread takes five times as long for a product of bf16 matrices as for one of float32."""
    num_threads, seconds = torch.get_num_threads(), {}
    torch.set_num_threads(1)  # as ranks have; on a busy machine float32 would wait for the second one
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(256, 256, dtype=dtype)
        begins = []
        for _ in range(4):
            begins.append(time.perf_counter())
            a @ a
        seconds[dtype] = min(b - a for a, b in pairwise(begins))
    torch.set_num_threads(num_threads)
    return seconds[torch.bfloat16] > 5 * seconds[torch.float32]


def configuration(name: str) -> dict[str, Any]:
    """The file's, with all linears in FP8 on a GPU, too, where such small ones gain nothing."""
    found: dict[str, Any] = json.loads(RUNS[name].read_text())
    if "fp8" in found:
        found["fp8"]["linear"] = {**found["fp8"].get("linear", {}), "min_size": 0}
    return found


def run(name: str, args: argparse.Namespace, ranks: int) -> Result:
    """Trains once; raises SystemExit with the end of the log when the launcher fails."""
    metrics, log, config = (args.out / f"{name}.{kind}" for kind in ("jsonl", "log", "json"))
    config.write_text(json.dumps(configuration(name)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *which_gpus(ranks)]
    port = free_port()
    command += ["--master_port", str(port), str(HERE / "demo_worker.py"), "--deepspeed_config", str(config)]
    command += ["--size", args.size, "--steps", str(args.steps), "--seq-len", str(args.seq_len)]
    command += ["--seed", str(args.seed), "--log", str(metrics)]
    env = dict(os.environ)
    if not uses_cuda():
        env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # stderr is a terminal or nothing: the progress bar goes there, everything else through the pipe.
    stderr = None if sys.stderr.isatty() else subprocess.STDOUT
    with (
        log.open("w", buffering=1) as file,  # by lines: a run that is killed leaves what it has said
        subprocess.Popen(command, env=env, stdout=-1, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if SHOWN.search(line):
                print(f"{name:5s}| {line}", end="", flush=True)
    for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):  # of DeepSpeed's CPU ranks, 66 MiB of memory each
        left.unlink()
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(
            f"{tail}\nThe {name} run failed with exit status {process.returncode}; its whole log is {log}."
        )
    *steps, last = (json.loads(line) for line in metrics.read_text().splitlines())
    return Result(
        losses=[step["loss"] for step in steps],
        held_out=last["held_out_loss"],
        tokens_per_s=statistics.median(step["tokens_per_s"] for step in steps),
        report=json.loads(metrics.with_suffix(".report.json").read_text()),
    )


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


def comparison(results: dict[str, Result]) -> Table:
    fp8, bf16 = results["FP8"], results["bf16"]
    resident = "resident_weight_bytes"
    table = Table(title=f"ZeRO-3, {fp8.report['num_params'] / 1e6:.1f} M parameters, {len(fp8.losses)} steps")
    for heading in ("", "bf16", "FP8", "FP8 / bf16"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = [
        (f"training loss (last {min(LAST, len(fp8.losses))} steps)", fp8.final_loss, bf16.final_loss, "{:.4f}".format),
        ("held-out loss", fp8.held_out, bf16.held_out, "{:.4f}".format),
        ("gathered per step, per rank", fp8.report["gathered_bytes"], bf16.report["gathered_bytes"], megabytes),
        ("weights between steps, per rank", fp8.report[resident], bf16.report[resident], megabytes),
        ("tokens/s, all ranks", fp8.tokens_per_s, bf16.tokens_per_s, "{:,.0f}".format),
    ]
    if "peak_gpu_bytes" in fp8.report:
        rows.append(("peak GPU memory", fp8.report["peak_gpu_bytes"], bf16.report["peak_gpu_bytes"], megabytes))
    for label, of_fp8, of_bf16, show in rows:
        ratio = f"{of_fp8 / of_bf16:.3f}" if of_bf16 else "-"
        table.add_row(label, show(of_bf16), show(of_fp8), ratio)
    return table


def plot(results: dict[str, Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (name, result), style in zip(results.items(), ("-", "--"), strict=True):
        axes.plot(result.losses, style, label=f"{name}, held-out {result.held_out:.3f}", linewidth=1.4)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title="ZeRO-3: FP8 weights against bf16")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gpus = num_gpus()
    ranks = args.ranks or min(gpus or 2, 2)
    console = Console()
    console.print(f"{ranks} rank(s) on {'GPU' if gpus else 'CPU'}; logs and metrics in {args.out}")
    if args.steps is None:
        args.steps = 100
        if not gpus and bf16_is_emulated():
            args.steps = 20
            console.print("This CPU computes bf16 in software, which stock DeepSpeed needs: 20 steps instead of 100.")
    for lock in abandoned(build_root()):
        lock.unlink(missing_ok=True)
        line = f"Removed {lock}: a build that was killed had left it, and DeepSpeed would wait for it."
        console.print(line, soft_wrap=True)
    console.print("A first start is silent for a minute or more: DeepSpeed compiles an operator.")
    try:
        results = {name: run(name, args, ranks) for name in RUNS}
    except KeyboardInterrupt:
        raise SystemExit("Stopped; start it again at any time.") from None
    console.print(comparison(results))
    if args.steps >= MIN_STEPS:
        num_fp8, num = (int(results["FP8"].report[key]) for key in ("num_fp8_linears", "num_linears"))
        if num_fp8 != num - 1:
            raise SystemExit(f"Expected all {num} linears but the head in FP8, got {num_fp8}.")
        console.print(f"{num_fp8} of {num} linears are in FP8: all but the head.")
        console.print(
            "Bytes are of the step in the middle. The last 3 % of the steps and the held-out loss are in bf16 in both."
        )
    if not gpus:
        console.print("On CPU torch emulates FP8 GEMMs: compare losses and bytes here, and tokens/s on a GPU.")
    plot(results, args.out / "loss.png")
    console.print(f"Loss curves: {args.out / 'loss.png'}")


if __name__ == "__main__":
    main()
