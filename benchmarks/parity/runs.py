"""Runs of a study: the files of their results, and their processes on all devices, in pieces."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_io import without_folders

from fp8_ds.device import num_gpus, uses_cuda
from fp8_ds.launcher import free_port
from parity.arms import TRUNKS
from parity.studies import Job, work_list
from parity.worker import CODE, IDENTITY, code_digest, file_digest, identity_of

BENCHMARKS = Path(__file__).resolve().parents[1]
FIELDS = ("regime", "arm", "seed", "step", "tokens", "seconds", "train_loss", "held_out_loss")
_LATER_SETTINGS = {"micro_batches": 1, "gpus_per_run": 1}
"""What runs had before there was a name for it."""
SHORTEST_PIECE = 90.0
"""Seconds; with less left no run starts: it would do little more than compile."""


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    start: float = field(default_factory=time.monotonic)


class Results:
    """Rows of finished runs and what is known about them, in the CSV and JSON of `stem`.

    Args:
        resume_from: CSVs of earlier calls; a run that two of them have is read once. Without them that of `stem`, where
            there is one.
    """

    def __init__(self, stem: Path, settings: dict[str, Any], resume_from: Sequence[Path] | None) -> None:
        self.stem = stem
        self.settings = settings
        self.rows: list[dict[str, str]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        for source in resume_from or [stem.with_suffix(".csv")]:
            if source.exists() or resume_from:
                self._read(source)

    def _read(self, source: Path) -> None:
        known = json.loads(source.with_suffix(".json").read_text())
        different = {
            key: (theirs, value)
            for key, value in self.settings.items()
            # The digest says which text.
            if key != "text" and (theirs := known["settings"].get(key, _LATER_SETTINGS.get(key))) != value
        }
        if different:
            raise SystemExit(
                f"{source.name}: expected runs with these settings, got others: {different} (theirs, ours). Runs "
                "differ in more than the arm then and are not pairs: choose another --out."
            )
        twice = self.runs.keys() & known["runs"].keys()
        if others := sorted(name for name in twice if self.runs[name] != known["runs"][name]):
            raise SystemExit(
                f"--resume-from: expected each run once, got another of {others} in {source.name}. Two machines do "
                "not train the same bits: leave out the file whose runs of these are not wanted."
            )
        with source.open() as file:
            self.rows += [row for row in csv.DictReader(file) if run_of(row) not in twice]
        self.runs |= known["runs"]

    def add(self, job: Job, log: Path) -> None:
        with log.open() as file:
            rows = [{"regime": job.regime, "arm": job.arm, "seed": job.seed, **row} for row in csv.DictReader(file)]
        self.rows += [{key: str(row[key]) for key in FIELDS} for row in rows]
        about = json.loads(log.with_suffix(".json").read_text())
        self.runs[job.name] = {key: value for key, value in about.items() if key not in (IDENTITY, CODE)}
        self.failures.pop(job.name, None)
        self.write()

    def drop(self, job: Job) -> None:
        """Forget a finished run."""
        self.rows = [row for row in self.rows if run_of(row) != job.name]
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
    """Runs a work list until it is empty or time is up, `per_gpu` jobs at a time on every `gpus_per_run` devices.

    A run that the time does not suffice for keeps its state in the cache folder; the next call goes on with it.
    """

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self.args = args
        self.results = results
        self.devices = args.gpus if args.gpus is not None else max(args.gpus_per_run, num_gpus())
        self.checkpoint = args.cache / "checkpoint.pt"
        self.logs = args.cache / "runs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.reconciled = False
        self.durations: list[float] = []
        self.running: list[Running] = []
        self.paused: list[str] = []
        self.left_out: list[str] = []
        self.deadline = time.monotonic() + args.budget

    def jobs(self) -> list[Job]:
        args = self.args
        return work_list(args.regimes, args.arms, args.seeds, args.seeds2, args.by_regime, args.as_named)

    def pending(self) -> list[Job]:
        """What is neither finished, running, paused nor failed; a stock run first if its checkpoint is wanted, and
        nothing else with --only-first-weights."""
        busy = {entry.job.name for entry in self.running}
        gone = set(self.results.runs) | busy | set(self.results.failures) | set(self.paused)
        jobs = [job for job in self.jobs() if job.name not in gone]
        if any(job.regime != 1 for job in jobs) and not self.checkpoint.exists():
            makers = [job for job in jobs if job.makes_checkpoint]
            again = Job(1, "stock", 0, only_checkpoint=True)
            if not makers and not any(entry.job.makes_checkpoint for entry in self.running) and again.name not in gone:
                jobs.insert(0, again)
        return [job for job in jobs if job.makes_checkpoint] if self.args.only_first_weights else jobs

    def _reconcile(self) -> None:
        """Runs that started from other weights than the cache has are no pairs for those of regimes 2 and 3 to come.

        Two machines do not train the same bits. A seed whose arms are all done stays: they are pairs of each other.
        """
        if self.reconciled or not self.checkpoint.exists():
            return
        self.reconciled = True
        digest = file_digest(self.checkpoint)
        later = [job for job in self.jobs() if job.regime != 1]
        unfinished = {(job.regime, job.seed) for job in later if job.name not in self.results.runs}
        dropped = [
            job
            for job in later
            if (job.regime, job.seed) in unfinished
            and self.results.runs.get(job.name, {}).get("checkpoint", digest) != digest
        ]
        kept = set(self.results.runs) - {job.name for job in later}
        for regime, seed in sorted({(job.regime, job.seed) for job in dropped}):
            strays = sorted(name for name in kept if name.startswith(f"r{regime}-") and name.endswith(f"-s{seed}"))
            if strays:
                raise SystemExit(
                    f"--seeds: expected a seed without runs from another machine's checkpoint, got {seed}, where "
                    f"{', '.join(strays)} would be paired with a base that is run again here. Use a seed of its own."
                )
        for job in dropped:
            print(f"{job.name} started from another machine's checkpoint: it is run again", flush=True)
            self.results.drop(job)
        self._adopt(later, digest)

    def _adopt(self, jobs: list[Job], checkpoint: str | None) -> None:
        """Results get what an earlier call has finished in this cache, whatever files its own results went to.

        Args:
            checkpoint: digest of the first weights that these jobs would start from.
        """
        for job in jobs:
            log = self.logs / f"{job.name}.csv"
            if job.name in self.results.runs or not (log.exists() and log.with_suffix(".json").exists()):
                continue
            about = json.loads(log.with_suffix(".json").read_text())
            if about.get(IDENTITY) != json.loads(json.dumps(self.identity(job, checkpoint))):
                continue
            if about[CODE] != code_digest():
                print(f"{job.name} is in the cache, trained by other code: it is run again", flush=True)
                continue
            self.results.add(job, log)
            print(f"{job.name} is in the cache: it is not run again", flush=True)

    def identity(self, job: Job, checkpoint: str | None) -> dict[str, Any]:
        """What decides what a run trains, but for the code: no time, no folder, no other run."""
        given = {"regime": job.regime, "arm": job.arm, "seed": job.seed, "lr": self.args.lr[job.regime == 2]}
        run = argparse.Namespace(**{**vars(self.args), **given, "only_checkpoint": job.only_checkpoint})
        return identity_of(run, self.args.gpus_per_run, self.results.settings["digest"], checkpoint)

    def ready(self, jobs: list[Job]) -> list[Job]:
        """Of these, what need not wait: for first weights, or for the run whose first steps are this one's, too.

        Branches come last: they are short, and fit where a whole run no longer does.
        """
        coming = {job.name for job in jobs} | {entry.job.name for entry in self.running} | {*self.paused}
        waits = {job.name for job in jobs if (trunk := trunk_of(job)) is not None and trunk.name in coming}
        found = [job for job in jobs if job.name not in waits and (job.regime == 1 or self.checkpoint.exists())]
        return sorted(found, key=lambda job: trunk_of(job) is not None)

    def branches(self, job: Job) -> list[str]:
        """Arms that go on from this run."""
        return [other.arm for other in self.jobs() if trunk_of(other) == job and other.name not in self.results.runs]

    def needed(self, job: Job) -> float:
        """Seconds that must be left for a run to start."""
        whole = max(self.durations, default=self.args.estimate)
        progress = self.args.cache / "state" / job.name / "progress.json"
        if progress.exists():
            done = json.loads(progress.read_text())["step"] / self.args.steps
            whole = min(whole, SHORTEST_PIECE + (1 - done) * whole)
        return whole if self.args.whole else min(whole, SHORTEST_PIECE)

    def run(self) -> None:
        """Until nothing is left that can start in time; what still runs at the deadline is ended."""
        groups = self.devices // self.args.gpus_per_run
        slots = [group for group in range(groups) for _ in range(self.args.per_gpu)]
        self._adopt([job for job in self.jobs() if job.regime == 1], None)
        while True:
            self._collect()
            self._reconcile()
            pending = self.pending()
            left = self.deadline - time.monotonic()
            jobs = [job for job in self.ready(pending) if left >= self.needed(job)]
            free = list(slots)
            for entry in self.running:
                free.remove(entry.slot)
            # The device with the most free slots first: two jobs share one only when all are busy.
            free.sort(key=lambda slot: -free.count(slot))
            spread = list(dict.fromkeys(free))
            for job in jobs[: len(spread)]:
                self._start(job, spread.pop(0))
                if self.args.stagger:
                    time.sleep(self.args.stagger)
            if not self.running and not jobs:
                self.left_out = [*self.paused, *(job.name for job in pending)]
                return
            if left < 0:
                self._end([job.name for job in pending])
                return
            time.sleep(0.3)

    def command(self, job: Job) -> list[str]:
        """Of the process that runs a piece of the job, as long as the time suffices."""
        args = self.args
        left = max(0.0, self.deadline - time.monotonic() - args.saving)
        values = {
            "regime": job.regime,
            "arm": job.arm,
            "seed": job.seed,
            "steps": args.steps,
            "lr": args.lr[job.regime == 2],
            "size": args.size,
            "stage": args.stage,
            "cache": args.cache,
            "log": self.logs / f"{job.name}.csv",
            "state": args.cache / "state" / job.name,
            "seconds": left,
            "checkpoint": self.checkpoint,
            "checkpoint-at": args.checkpoint_at,
            "micro-batches": args.micro_batches,
        }
        ranks = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus_per_run}", "-m", "--"]
        launcher = ranks if args.gpus_per_run > 1 else []
        command = [sys.executable, "-m", *launcher, "parity.worker"]
        command += [f"--{key}={value}" for key, value in values.items()]
        command += [f"--save-checkpoint={self.checkpoint}"] if job.makes_checkpoint else []
        command += ["--only-checkpoint"] if job.only_checkpoint else []
        command += ["--branches", *branches] if (branches := self.branches(job)) else []
        return [*command, *(["--compile"] if args.compile else [])]

    def _start(self, job: Job, slot: int) -> None:
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(free_port())
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if uses_cuda():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else [str(k) for k in range(self.devices)]
            count = self.args.gpus_per_run
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * count : (slot + 1) * count])
        for suffix in ("csv", "json"):  # of a run that was dropped
            (self.logs / f"{job.name}.{suffix}").unlink(missing_ok=True)
        with (self.logs / f"{job.name}.log").open("wb") as output:
            process = subprocess.Popen(self.command(job), stdout=output, stderr=subprocess.STDOUT, env=env)
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
            if entry.process.returncode == 0:
                self.paused.append(job.name)
                step = log.with_suffix(".part").read_text().strip().splitlines()[-1].split(",")[0]
                print(f"paused {job.name} at step {step}: its state is in the cache folder", flush=True)
                continue
            tail = (self.logs / f"{job.name}.log").read_text(errors="replace")[-1500:]
            self.results.failures[job.name] = without_folders(tail)
            self.results.write()
            print(f"FAILED {job.name}:\n{tail}", flush=True)

    def _end(self, pending: list[str]) -> None:
        """End this list's own processes; they are run again by the next call."""
        for entry in self.running:
            entry.process.terminate()
        for entry in self.running:
            try:
                entry.process.wait(10)
            except subprocess.TimeoutExpired:
                entry.process.kill()
        cut_off = [f"{entry.job.name} (cut off)" for entry in self.running]
        self.left_out = [*self.paused, *pending, *cut_off]
        self.running.clear()


def run_of(row: dict[str, str]) -> str:
    """The name of the run whose row of a CSV this is."""
    return Job(int(row["regime"]), row["arm"], int(row["seed"])).name


def trunk_of(job: Job) -> Job | None:
    """The run whose first steps are those of this one, which goes on from there."""
    trunk = TRUNKS.get(job.arm)
    return None if trunk is None else Job(job.regime, trunk, job.seed)
