"""One call on a lent GPU machine: measurements, each with a limit, until the time is used up.

    python benchmarks/session.py --list
    python benchmarks/session.py --out $OUT --limit 560 layer-table states     # these, in this order
    python benchmarks/session.py --out $OUT --limit 560 --gpus 1               # all for one GPU, the most wanted first
    python benchmarks/session.py --out /tmp/R --limit 1600 --detach parity-first parity-8gpus tests   # the first call
    python benchmarks/session.py --out /tmp/R --wait 560 --archive $OUT/R.tgz                         # each further one

A step starts, in the order given, as soon as enough of the machine's GPUs are free, and sees only its own: with several
GPUs steps run side by side. One that waits for GPUs holds back those of the list behind it; one that waits for another
step (`parity-first` makes what `parity-8gpus` needs, on one GPU) does not. They share the host's cores: say so beside
timings, and look at the log of a reference arm. The last form outlives a call, in a copy of the working tree; the
next calls bring what is in --out, as one archive, but for checkpoints and traces other than those of the device alone.

A step that no longer fits is left out with a line. One takes up to 1.3 times what is predicted, if the call has so much
left; one that hangs is killed with everything it started, a little later or at the call's end. Results are written to
--out as they are made, and session.json after each step (what ran, how long, how it ended): a call that is cut off
keeps what it had. Logs of steps are in OUT/logs. The exit status is the worst one's.

Results then go to benchmarks/results, by the scripts' own ways of adding files from elsewhere (`--report`, `--add`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from session_detached import ENDED, archive, detach, wait
from session_steps import STEPS, Step

HERE = Path(__file__).resolve().parent
KILLED = -signal.SIGKILL
MIN_SECONDS = 20.0
"""With less nothing can be measured."""
SLACK = 1.3
"""A step may take so much more than predicted: hosts differ, and half a run shows less than the step after it would."""


@dataclass
class Ran:
    """How a step ended: its exit status, or why it did not run."""

    name: str
    command: str
    status: int | None
    seconds: float
    note: str = ""


@dataclass
class Running:
    """A step under way, on some GPUs."""

    step: Step
    command: str
    process: subprocess.Popen[bytes]
    log: Path
    limit: float
    gpus: tuple[str, ...]
    start: float = field(default_factory=time.monotonic)

    def ended(self) -> Ran | None:
        """How, if it has or its time is up; everything that it started is ended then, too."""
        status = self.process.poll()
        seconds = time.monotonic() - self.start
        if status is None and seconds < self.limit:
            return None
        _kill_group(self.process)
        note = "" if status is not None else f"killed after {self.limit:.0f} s"
        return Ran(self.step.name, self.command, KILLED if status is None else status, seconds, note)


def torchs_cudnn() -> dict[str, str]:
    """For the environment of a step, so that Transformer Engine loads no other cuDNN than torch has.

    With the machine's older one SDPA leaves cuDNN for FlashAttention 2 in every arm of the process, and Transformer
    Engine itself may not load. Not tried on a machine yet; LD_LIBRARY_PATH is to be unset there all the same.
    """
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    folders = spec.submodule_search_locations if spec is not None else None
    return {"CUDNN_HOME": folders[0]} if folders else {}


def start_step(step: Step, out: Path, seconds: float, gpus: tuple[str, ...]) -> Running:
    """Begin it, for at most `seconds`; its output goes to a log."""
    folder = out / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    reserve = MIN_SECONDS / 2
    limit = min(seconds, SLACK * step.seconds + reserve)
    inside = int(limit - reserve)
    folders = {"out": shlex.quote(str(out)), "own": shlex.quote(str(out / step.name))}
    command = step.command.format(python=shlex.quote(sys.executable), seconds=inside, **folders)
    path = folder / f"{step.name}.txt"
    environment = {**os.environ, **torchs_cudnn(), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=HERE.parent,
            stdout=log,
            stderr=log,
            stdin=-3,
            start_new_session=True,
            env=environment,
        )
    print(f"=== {step.name} on {', '.join(gpus)}: {step.why}", flush=True)
    return Running(step, command.replace(str(out), "OUT"), process, path, limit, gpus)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Everything in its session; nothing if all of it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_session(steps: Sequence[Step], out: Path, limit: float, gpus: Sequence[str] = ("0",)) -> list[Ran]:
    """Run steps side by side as far as GPUs suffice, started in their order; `limit` seconds for all of them.

    session.json is written after each, in the order in which they ended.

    Args:
        gpus: of the machine, by number. A step that needs more is left out.
    """
    end = time.monotonic() + limit
    free, waiting, running, done = list(gpus), list(steps), list[Running](), list[Ran]()
    while waiting or running:
        for one in list(running):
            if (ran := one.ended()) is not None:
                running.remove(one)
                free += one.gpus
                done.append(ran)
                print(
                    "\n".join([f"--- {ran.name}:", *one.log.read_text(errors="replace").splitlines()[-15:]]), flush=True
                )
        for step in list(waiting):
            if step.after in {other.name for other in waiting} | {one.step.name for one in running}:
                continue
            left = end - time.monotonic()
            if step.gpus > len(gpus) or left < max(MIN_SECONDS, 0.5 * step.seconds):
                why = f"{len(gpus)} GPUs" if step.gpus > len(gpus) else f"{left:.0f} s left, {step.seconds:.0f} needed"
                done.append(Ran(step.name, "", None, 0.0, f"left out: {why}"))
                waiting.remove(step)
            elif step.gpus <= len(free):
                taken, free = tuple(free[: step.gpus]), free[step.gpus :]
                running.append(start_step(step, out, left, taken))
                waiting.remove(step)
            else:
                break
        (out / "session.json").write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n")
        if running:
            time.sleep(0.2)
    return done


def visible_gpus() -> list[str]:
    """By what CUDA_VISIBLE_DEVICES names, or all; one on a machine without any: dry runs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(k) for k in range(max(1, torch.cuda.device_count()))]


def main() -> None:
    by_name = {step.name: step for step in STEPS}
    parser = argparse.ArgumentParser(description="Measurements one after another on a lent GPU machine.")
    parser.add_argument("steps", nargs="*", choices=[[], *by_name], metavar="STEP", help="in this order; default: all")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    parser.add_argument("--gpus", type=int, default=1, help="without steps: those that need so many")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all steps")
    parser.add_argument("--out", type=Path, help="folder for results, logs and session.json")
    parser.add_argument("--detach", action="store_true", help="run on after this call, in a copy of the working tree")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="start nothing; wait for a detached session")
    parser.add_argument(
        "--archive", type=Path, metavar="TGZ", help="with --wait: what is in --out and not large, to take along"
    )
    arguments = parser.parse_args()
    if arguments.archive is not None and arguments.wait is None:
        parser.error("--archive goes with --wait")
    if arguments.list:
        for step in STEPS:
            print(f"{step.name:21} {step.gpus} GPU {step.seconds:5.0f} s  {step.why}")
        return
    if arguments.out is None:
        parser.error("--out is needed: nothing else of the machine is kept")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.wait is not None:
        wait(out, arguments.wait)
        if arguments.archive is not None:
            archive(out, arguments.archive)
        return
    if arguments.detach:
        own = ["--out", str(out), "--limit", str(arguments.limit), "--gpus", str(arguments.gpus), *arguments.steps]
        print(f"process {detach(own, out)}, {out}")
        return
    steps = [by_name[name] for name in arguments.steps] or [s for s in STEPS if s.gpus == arguments.gpus]
    try:
        done = run_session(steps, out, arguments.limit, visible_gpus())
        lines = (f"{one.name:21} {one.seconds:6.0f} s  {one.note or f'exit {one.status}'}" for one in done)
        print("\n".join(lines), flush=True)
    finally:
        (out / ENDED).touch()  # after what a waiting call shows
    raise SystemExit(max((abs(one.status or 0) for one in done), default=0))


if __name__ == "__main__":
    main()
