"""One call on a lent GPU machine: measurements one after another, each with a limit, until the time is used up.

    python benchmarks/session.py --list
    python benchmarks/session.py --out $OUT --limit 560 layer-table states     # these, in this order
    python benchmarks/session.py --out $OUT --limit 560 --gpus 1               # all for one GPU, the most wanted first

A step that no longer fits is left out with a line. One that hangs is killed with everything it started, at its limit or
at the call's. Results are written to --out as they are made, and session.json after each step (what ran, how long, how
it ended): a call that is cut off keeps what it had. Logs of steps are in OUT/logs. The exit status is the worst one's.

Results then go to benchmarks/results, by the scripts' own ways of adding files from elsewhere (`--report`, `--add`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KILLED = -signal.SIGKILL
MIN_SECONDS = 20.0
"""With less nothing can be measured."""


@dataclass(frozen=True)
class Step:
    """One measurement.

    Args:
        name: of it.
        command: of a shell in this checkout; {python} and {out} are filled in, {seconds} is what it may take.
        seconds: that it takes on an H200, about; it is killed at 1.3 times that.
        why: what is shown by it.
        gpus: that it needs.
    """

    name: str
    command: str
    seconds: float
    why: str
    gpus: int = 1


def _benchmark(script: str, arguments: str) -> str:
    return f"{{python}} benchmarks/{script}.py {arguments} --out {{out}}"


def _tests(selection: str) -> str:
    return f"{{python}} -m pytest -q -m gpu -p no:cacheprovider tests/gpu {selection}"


def _megatron(piece: str) -> str:
    """$MEGATRON_LM_PATH must name a clone that can be written to."""
    return _benchmark("megatron_pretrain", f"--piece {piece} --budget {{seconds}}")


STEPS = (
    Step("tests-long", _tests("-k long"), 150, "issue 7 F: 2,000 steps, no memory lost, no wait added"),
    Step("tests-new", _tests("-k 'monitor or backends or tp'"), 120, "issues 5, 6, 8: what has not run on a GPU"),
    Step(
        "parity-branches",
        _benchmark(
            "gpt_parity",
            "--compile --regimes 3 --resume-from benchmarks/results/2026-11-21-gpt-parity-rotary.csv",
        ),
        560,
        "issue 3 H: the third seed, fp8 and e4m19",
    ),
    Step("layer-table", "{python} benchmarks/layer_table.py --out {out}/nvidia-h200.json", 240, "issue 4 D: the table"),
    Step(
        "attention",
        _benchmark("attention", "--budget {seconds} --name attention"),
        285,
        "issue 6 D: latency and accuracy of the backends (fa3-fwd wheel needed)",
    ),
    Step("states", _benchmark("end_to_end", "--piece states --budget {seconds}"), 420, "issue 4 H 1: states, release"),
    Step("recipes", _benchmark("end_to_end", "--piece recipes --budget {seconds}"), 300, "issue 4 B, H 1: recipes"),
    Step("losses", _benchmark("end_to_end", "--piece losses --budget {seconds}"), 400, "issue 4 H: losses on text"),
    Step("gpt2", _benchmark("end_to_end", "--piece gpt2 --budget {seconds}"), 200, "issue 4 H 4: small layers"),
    Step("megatron-speed", _megatron("speed"), 440, "issue 6 G: ours beside stock Megatron-LM"),
    Step("megatron-states", _megatron("states"), 410, "issue 6 G: FP8 Adam in forms (a) and (b)"),
    Step("megatron-losses", _megatron("losses"), 555, "issue 6 G: 500 iterations on text"),
    Step("tests", _tests(""), 560, "all of tests/gpu for one GPU"),
    Step(
        "parallel-layers",
        _benchmark(
            "parallel_layers",
            "--gpus 2 --budget {seconds} --arms bf16 torchao te ours ours-compiled ours-compiled-overlap ours-chunked",
        ),
        300,
        "issue 5 E, G: compiled arms, overlap",
        gpus=2,
    ),
    Step("gather", _benchmark("gather", "--gpus 2"), 60, "issue 4 H 3: one layer's gather", gpus=2),
    Step(
        "8b",
        _benchmark("end_to_end", "--piece 8b --gpus 2 --budget {seconds}"),
        500,
        "issue 4 H 2: Llama-3-8B, ZeRO-3",
        gpus=2,
    ),
    Step("megatron-tp2", _megatron("tp2"), 380, "issue 6 G: TP=2 with sequence parallelism", gpus=2),
)


@dataclass
class Ran:
    """How a step ended: its exit status, or why it did not run."""

    name: str
    command: str
    status: int | None
    seconds: float
    note: str = ""


def run_step(step: Step, out: Path, seconds: float) -> Ran:
    """Run it for at most `seconds`; its output goes to a log, and the log's end to the screen."""
    folder = out / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    limit = min(seconds, 1.3 * step.seconds)
    inside = int(min(step.seconds, limit - MIN_SECONDS / 2))
    command = step.command.format(python=shlex.quote(sys.executable), out=shlex.quote(str(out)), seconds=inside)
    start = time.monotonic()
    path = folder / f"{step.name}.txt"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, shell=True, cwd=HERE.parent, stdout=log, stderr=log, stdin=-3, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = KILLED
        finally:
            _kill_group(process)
    note = f"killed after {limit:.0f} s" if status == KILLED else ""
    print("\n".join(path.read_text(errors="replace").splitlines()[-15:]), flush=True)
    return Ran(step.name, command.replace(str(out), "OUT"), status, time.monotonic() - start, note)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Everything in its session; nothing if all of it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_session(steps: Sequence[Step], out: Path, limit: float) -> list[Ran]:
    """Run steps in their order; `limit` seconds for all of them. session.json is written after each."""
    end = time.monotonic() + limit
    done: list[Ran] = []
    for step in steps:
        left = end - time.monotonic()
        if left < max(MIN_SECONDS, 0.5 * step.seconds):
            done.append(Ran(step.name, "", None, 0.0, f"left out: {left:.0f} s left, {step.seconds:.0f} needed"))
        else:
            print(f"=== {step.name}: {step.why}", flush=True)
            done.append(run_step(step, out, left))
        (out / "session.json").write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n")
    return done


def main() -> None:
    by_name = {step.name: step for step in STEPS}
    parser = argparse.ArgumentParser(description="Measurements one after another on a lent GPU machine.")
    parser.add_argument("steps", nargs="*", choices=[[], *by_name], metavar="STEP", help="in this order; default: all")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    parser.add_argument("--gpus", type=int, default=1, help="without steps: those that need so many")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all steps")
    parser.add_argument("--out", type=Path, help="folder for results, logs and session.json")
    arguments = parser.parse_args()
    if arguments.list:
        for step in STEPS:
            print(f"{step.name:16} {step.gpus} GPU {step.seconds:5.0f} s  {step.why}")
        return
    if arguments.out is None:
        parser.error("--out is needed: nothing else of the machine is kept")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    steps = [by_name[name] for name in arguments.steps] or [s for s in STEPS if s.gpus == arguments.gpus]
    done = run_session(steps, out, arguments.limit)
    print("\n".join(f"{one.name:16} {one.seconds:6.0f} s  {one.note or f'exit {one.status}'}" for one in done))
    raise SystemExit(max((abs(one.status or 0) for one in done), default=0))


if __name__ == "__main__":
    main()
