"""Held-out loss of FP8 states against fp32 masters: a 124 M GPT on real text, paired seeds. Writes dated result files.

    python benchmarks/gpt_parity.py --compile                          # all arms and regimes, all visible GPUs
    python benchmarks/gpt_parity.py --size tiny --steps 10 --seeds 0 --text-bytes 1000000      # dry run on CPU

Regime 1 trains from scratch at lr 3e-4 (to zero, linearly). At 6e-4 paired runs part between steps 500 and 1,200 and
stay apart (results of 2026-11-20, of moments rounded to nearest). Regime 2 continues a stock run, from bf16 weights, at
a constant 1e-5: an update is then smaller than half a step of a coarse master, so masters without stochastic rounding
must lose there. It starts where the stock run of seed 0 has done 70 % of its steps, its learning rate still at a third
of the peak, so that there is loss to gain; it reads on in the text where that run was. Regime 3 branches off there,
too, and trains as regime 1 does, warm-up and 3e-4 to zero: 0.39 % parted the first pair of regime 1, because one arm
learned to copy from its context some 20 steps later than the other; branches start behind that jump, so fewer seeds
tell more.

Runs are a work list over all devices. What is finished is in the results CSV and is not run again: a second call
continues, also on another machine of the same image (--resume-from, when its results folder starts empty). Tokens and
the first weights of regimes 2 and 3 live in --cache; where a fresh machine has none, the stock run that makes them goes
first.

Prediction, written before the first run on an H200: in regime 1 every FP8 arm within 0.1 % of stock in the mean, seeds
differing more than that; in regime 2 e4m19 and e4m11 within 0.02 % of the fp32 states under the same FP8 linears,
e4m11 rounded to nearest 0.05 to 0.5 % worse than that, bf16 rounded to nearest 0.5 % or more worse than stock. Of
regime 3, written before its first run: every FP8 arm within 0.1 % of stock in the mean, single pairs within 0.15 %.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpt_parity_data
import gpt_parity_plot
import torch
from gpt_parity_worker import ARMS, SCHEDULED, SIZES, file_digest
from results_io import dated_stem, heading, without_folders

HERE = Path(__file__).parent
REGIME_ARMS = {
    1: ("stock", "fp8", "e4m19", "e4m11", "torchao"),
    2: ("stock", "e4m11", "e4m11-nearest", "bf16-nearest", "fp8", "e4m19"),
    3: ("stock", "e4m11", "e4m19", "fp8"),
}
MAX_EPOCHS = 2
FIELDS = ("regime", "arm", "seed", "step", "tokens", "seconds", "train_loss", "held_out_loss")


@dataclass(frozen=True)
class Job:
    """One run of the work list.

    Args:
        only_checkpoint: its results are known; it runs for the first weights of regimes 2 and 3.
    """

    regime: int
    arm: str
    seed: int
    only_checkpoint: bool = False

    @property
    def name(self) -> str:
        return f"r{self.regime}-{self.arm}-s{self.seed}{'-checkpoint' if self.only_checkpoint else ''}"

    @property
    def makes_checkpoint(self) -> bool:
        return (self.regime, self.arm, self.seed) == (1, "stock", 0)


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    start: float = field(default_factory=time.monotonic)


def work_list(args: argparse.Namespace) -> list[Job]:
    """All runs by seed, the rival last: a list cut short has whole pairs."""
    jobs = []
    for seed in dict.fromkeys(args.seeds + args.seeds2):
        for regime in args.regimes:
            if seed in (args.seeds2 if regime == 2 else args.seeds):
                arms = REGIME_ARMS[regime] + (() if regime == 2 else SCHEDULED)
                jobs += [Job(regime, arm, seed) for arm in arms if arm != "torchao"]
    jobs += [Job(1, "torchao", args.seeds[0])] if 1 in args.regimes else []
    return [job for job in jobs if job.arm in args.arms]


class Results:
    """Rows of finished runs and what is known about them, in the CSV and JSON of `stem`."""

    def __init__(self, stem: Path, settings: dict[str, Any], resume_from: Path | None) -> None:
        self.stem = stem
        self.settings = settings
        self.rows: list[dict[str, str]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        source = resume_from or stem.with_suffix(".csv")
        if source.exists():
            self._read(source)

    def _read(self, source: Path) -> None:
        known = json.loads(source.with_suffix(".json").read_text())
        different = {
            key: (known["settings"].get(key), value)
            for key, value in self.settings.items()
            if key != "text" and known["settings"].get(key) != value  # the digest says which text
        }
        if different:
            raise SystemExit(
                f"{source.name}: expected runs with these settings, got others: {different} (theirs, ours). Runs "
                "differ in more than the arm then and are not pairs: choose another --out."
            )
        with source.open() as file:
            self.rows = list(csv.DictReader(file))
        self.runs = known["runs"]

    def add(self, job: Job, log: Path) -> None:
        with log.open() as file:
            rows = [{"regime": job.regime, "arm": job.arm, "seed": job.seed, **row} for row in csv.DictReader(file)]
        self.rows += [{key: str(row[key]) for key in FIELDS} for row in rows]
        self.runs[job.name] = json.loads(log.with_suffix(".json").read_text())
        self.failures.pop(job.name, None)
        self.write()

    def drop(self, job: Job) -> None:
        """Forget a finished run."""
        key = (str(job.regime), job.arm, str(job.seed))
        self.rows = [row for row in self.rows if (row["regime"], row["arm"], row["seed"]) != key]
        del self.runs[job.name]

    def write(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        self.stem.with_suffix(".csv").write_text(text.getvalue())
        content = {"settings": self.settings, "runs": self.runs, "failures": self.failures}
        self.stem.with_suffix(".json").write_text(json.dumps(content, indent=1))


class Scheduler:
    """Runs a work list, `per_gpu` jobs at a time on each device, until it is empty or time is up."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self.args = args
        self.results = results
        self.devices = args.gpus if args.gpus is not None else max(1, torch.cuda.device_count())
        self.checkpoint = args.cache / "checkpoint.pt"
        self.logs = args.cache / "runs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.reconciled = False
        self.durations: list[float] = []
        self.running: list[Running] = []
        self.left_out: list[str] = []
        self.deadline = time.monotonic() + args.budget

    def pending(self) -> list[Job]:
        """What is neither finished nor running nor failed; a stock run first if its checkpoint is wanted."""
        busy = {entry.job.name for entry in self.running}
        gone = set(self.results.runs) | busy | set(self.results.failures)
        jobs = [job for job in work_list(self.args) if job.name not in gone]
        if any(job.regime != 1 for job in jobs) and not self.checkpoint.exists():
            makers = [job for job in jobs if job.makes_checkpoint]
            again = Job(1, "stock", 0, only_checkpoint=True)
            if not makers and not any(entry.job.makes_checkpoint for entry in self.running) and again.name not in gone:
                jobs.insert(0, again)
        return jobs

    def _reconcile(self) -> None:
        """Runs that started from other weights than the cache has are no pairs for those of regimes 2 and 3 to come.

        Two machines do not train the same bits. A seed whose arms are all done stays: they are pairs of each other.
        """
        if self.reconciled or not self.checkpoint.exists():
            return
        self.reconciled = True
        digest = file_digest(self.checkpoint)
        later = [job for job in work_list(self.args) if job.regime != 1]
        unfinished = {(job.regime, job.seed) for job in later if job.name not in self.results.runs}
        for job in later:
            run = self.results.runs.get(job.name)
            if run is not None and (job.regime, job.seed) in unfinished and run.get("checkpoint") != digest:
                print(f"{job.name} started from another machine's checkpoint: it is run again", flush=True)
                self.results.drop(job)

    def ready(self, jobs: list[Job]) -> list[Job]:
        return [job for job in jobs if job.regime == 1 or self.checkpoint.exists()]

    def run(self) -> None:
        """Until nothing is left that can start in time; what still runs at the deadline is ended."""
        slots = [device for device in range(self.devices) for _ in range(self.args.per_gpu)]
        while True:
            self._collect()
            self._reconcile()
            jobs = self.pending()
            left = self.deadline - time.monotonic()
            expected = max(self.durations, default=self.args.estimate)
            if left < expected:
                self.left_out = [job.name for job in jobs]
                jobs = []
            free = list(slots)
            for entry in self.running:
                free.remove(entry.slot)
            # The device with the most free slots first: two jobs share one only when all are busy.
            free.sort(key=lambda slot: -free.count(slot))
            spread = list(dict.fromkeys(free))
            for job in self.ready(jobs)[: len(spread)]:
                self._start(job, spread.pop(0))
                if self.args.stagger:
                    time.sleep(self.args.stagger)
            if not self.running and not self.ready(jobs):
                self.left_out = self.left_out or [job.name for job in jobs]
                return
            if left < 0:
                self._end()
                return
            time.sleep(0.3)

    def _start(self, job: Job, slot: int) -> None:
        args = self.args
        command = [sys.executable, str(HERE / "gpt_parity_worker.py"), f"--regime={job.regime}", f"--arm={job.arm}"]
        command += [
            f"--seed={job.seed}",
            f"--steps={args.steps}",
            f"--lr={args.lr[job.regime == 2]}",
            f"--size={args.size}",
        ]
        command += [f"--stage={args.stage}", f"--cache={args.cache}", f"--log={self.logs / job.name}.csv"]
        command += [f"--checkpoint={self.checkpoint}", f"--checkpoint-at={args.checkpoint_at}"]
        command += [f"--save-checkpoint={self.checkpoint}"] if job.makes_checkpoint else []
        command += ["--only-checkpoint"] if job.only_checkpoint else []
        command += ["--compile"] if args.compile else []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env = {
            **os.environ,
            **alone,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        if torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else [str(k) for k in range(self.devices)]
            env["CUDA_VISIBLE_DEVICES"] = devices[slot]
        with (self.logs / f"{job.name}.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        self.running.append(Running(job, process, slot))
        print(f"started {job.name} on device {slot}", flush=True)

    def _collect(self) -> None:
        for entry in list(self.running):
            if entry.process.poll() is None:
                continue
            self.running.remove(entry)
            job, seconds = entry.job, time.monotonic() - entry.start
            log = self.logs / f"{job.name}.csv"
            if entry.process.returncode == 0 and log.exists():
                self.durations.append(seconds)
                if not job.only_checkpoint:
                    self.results.add(job, log)
                last = log.read_text().strip().splitlines()[-1].split(",")[-1]
                print(f"finished {job.name}: held-out loss {last}, {seconds:.0f} s", flush=True)
                continue
            tail = (self.logs / f"{job.name}.log").read_text(errors="replace")[-1500:]
            self.results.failures[job.name] = without_folders(tail)
            self.results.write()
            print(f"FAILED {job.name}:\n{tail}", flush=True)

    def _end(self) -> None:
        """End this list's own processes; they are run again by the next call."""
        for entry in self.running:
            entry.process.terminate()
        for entry in self.running:
            try:
                entry.process.wait(10)
            except subprocess.TimeoutExpired:
                entry.process.kill()
            self.left_out.append(f"{entry.job.name} (cut off)")
        self.running.clear()


def check_epochs(args: argparse.Namespace, windows: int) -> str:
    """A sentence on how often the text is read.

    Raises:
        SystemExit: more than twice in one run.
    """
    own = args.steps * SIZES[args.size].batch / windows
    if own > MAX_EPOCHS:
        raise SystemExit(
            f"steps: expected at most {MAX_EPOCHS} epochs, got {own:.2f}. Use fewer --steps, or more text."
        )
    both = own * (1 + args.checkpoint_at)
    return f"A run reads the text {own:.2f} times; regimes 2 and 3 with what came before {both:.2f} times."


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SIZES), default="124m")
    parser.add_argument("--steps", type=int, default=3072, help="of 32 x 1024 tokens: 100.7 M")
    parser.add_argument("--lr", type=float, nargs=2, default=[3e-4, 1e-5], help="of regimes 1 and 3, the peak; of 2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds2", type=int, nargs="+", help="of regime 2; default: --seeds")
    parser.add_argument("--regimes", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=[a for a in ARMS if a not in SCHEDULED], choices=list(ARMS))
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--vocabulary", choices=["auto", "bpe", "bytes"], default="auto")
    parser.add_argument("--text-bytes", type=int, help="use about this much text: dry runs")
    parser.add_argument("--checkpoint-at", type=float, default=0.7, help="share of the stock run where 2 and 3 start")
    parser.add_argument("--compile", action="store_true", help="torch.compile whole models, not only the loss")
    parser.add_argument("--gpus", type=int, help="default: all that are visible; one on CPU")
    parser.add_argument("--per-gpu", type=int, default=1)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between two starts")
    parser.add_argument("--budget", type=float, default=560, help="seconds, preparing the text included")
    parser.add_argument("--estimate", type=float, default=240, help="seconds a run takes, until one has been seen")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "fp8_ds_gpt_parity"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--resume-from", type=Path, help="CSV of an earlier call, its .json beside it")
    parser.add_argument("--only-report", action="store_true", help="tables and plots of what --resume-from has")
    args = parser.parse_args()
    args.seeds2 = args.seeds2 if args.seeds2 is not None else args.seeds
    return args


def main() -> None:
    args = parse_args()
    start = time.monotonic()
    stem = dated_stem(args.out, f"gpt-parity{'' if args.size == '124m' else '-' + args.size}")
    size = SIZES[args.size]
    if args.only_report:
        settings = json.loads((args.resume_from or stem).with_suffix(".json").read_text())["settings"]
        results, left_out = Results(stem, settings, args.resume_from), []
    else:
        needed = args.steps * size.batch * size.seq_len // MAX_EPOCHS
        text, _ = gpt_parity_data.prepare(args.cache, args.vocabulary, size.vocab_size, needed, args.text_bytes)
        sentence = f"{text.describe()}. {check_epochs(args, (text.num_train - 1) // size.seq_len)}"
        print(f"{sentence} (ready after {time.monotonic() - start:.0f} s)", flush=True)
        settings = {
            "size": args.size,
            "positions": "rotary",
            "steps": args.steps,
            "lr": args.lr,
            "batch": size.batch,
            "seq_len": size.seq_len,
            "stage": args.stage,
            "compile": args.compile,
            "checkpoint_at": args.checkpoint_at,
            "digest": text.digest,
            "text": sentence,
        }
        results = Results(stem, settings, args.resume_from)
        args.budget -= time.monotonic() - start
        scheduler = Scheduler(args, results)
        scheduler.run()
        left_out = scheduler.left_out
    results.write()
    report = gpt_parity_plot.report(results.rows, results.settings["steps"])
    gpt_parity_plot.plot(results.rows, results.settings["steps"], stem.with_suffix(".png"))
    about = f"{results.settings['text']}\n\nRuns: {json.dumps(results.runs)}\n\nLeft out: {left_out}\n\n"
    failures = "".join(f"\nFAILED {name}\n```\n{tail}\n```\n" for name, tail in results.failures.items())
    stem.with_suffix(".md").write_text(heading(stem.name) + about + report + failures)
    print(report + failures + f"\nLeft out: {left_out}")


if __name__ == "__main__":
    main()
