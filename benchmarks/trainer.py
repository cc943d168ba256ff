"""An unchanged script of transformers' Trainer and TRL's SFTTrainer, in FP8 by one key beside DeepSpeed's bf16.

    python benchmarks/trainer.py --budget 540 --out $OUT
    python benchmarks/trainer.py --budget 540 --resume FETCHED.json --out $OUT        # what that file lacks
    python benchmarks/trainer.py --budget 0 --resume FETCHED.json                     # its table alone

The script is trainer_run.py, with Trainer's own arguments and the file of examples/huggingface for its `--deepspeed`:
"auto" values, and no optimizer, so that Trainer makes its AdamW. FP8 is `python -m fp8_ds.run` before the script and
`"fp8": {"enabled": true}` in the file, nothing else. The model is a Llama of width 4096: in eager mode linears of width
2048 with 8,192 tokens are too small to gain, and the key leaves them in bf16. A run is a process of its own, alone on
its GPU. Speeds are medians of pairs of steps after the first 20; the steps that the key takes in bf16 at the end are
timed apart, without those in which it changes. Without a GPU: a tiny model, compiled by aot_eager.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median
from threading import Lock
from typing import Any, NamedTuple

from end_to_end import machine
from out_of_box import TINY, VOCAB, WIDTHS, environment, is_good, mean_ms, model_config, write
from processes import ENDED, error_of, run_logged
from results_io import ROOT, dated_stem, heading
from training_text import prepare

from fp8_ds.host import num_gpus, uses_cuda

WARM, EVERY, LOSS_STEPS = 20, 2, 20
"""Steps that are not timed, steps from log to log, and steps at the end over which the loss is averaged."""
LIMIT = 400.0
"""Seconds after which a run has failed."""
EXPECTED = {"eager": 60.0, "compiled": 150.0}
"""Seconds of a run for which there must be time, if none like it has ended."""


class Run(NamedTuple):
    """One training; each row of the table is two."""

    trainer: str
    stage: int
    mode: str
    activations: str
    is_ours: bool

    @property
    def name(self) -> str:
        return " ".join([*map(str, self[:-1]), "fp8" if self.is_ours else "bf16"])


ROWS = (
    ("Trainer", 2, "eager", "kept"),
    ("Trainer", 3, "eager", "checkpointed"),
    ("SFTTrainer", 2, "eager", "checkpointed"),
    ("Trainer", 2, "compiled", "kept"),
    ("SFTTrainer", 2, "compiled", "checkpointed"),
)
"""In the order of measurement; SFTTrainer checkpoints by default."""


def command(run: Run, folder: Path, text: Path, steps: int) -> list[str]:
    """A user's command line, without the launcher; `folder` gets the files that it names."""
    on_cuda, (width, sizes) = uses_cuda(), sizes_here()
    config = json.loads((ROOT / "examples/huggingface/ds_zero3_bf16.json").read_text())
    config["zero_optimization"]["stage"] = run.stage
    if run.is_ours:
        config["fp8"] = {"enabled": True}
    model = {"model_type": "llama", **model_config("llama", width, sizes, VOCAB if on_cuda else 256)}
    for name, content in (("ds", config), ("model", model)):
        Path(folder, f"{name}.json").write_text(json.dumps(content))
    options: dict[str, Any] = {"output_dir": folder, "deepspeed": folder / "ds.json", "bf16": True}
    options |= {"max_steps": steps, "logging_steps": EVERY, "per_device_train_batch_size": sizes.micro_batch}
    options |= {"learning_rate": sizes.lr, "warmup_steps": 10, "save_strategy": "no", "report_to": "none"}
    options |= {"disable_tqdm": True, "use_cpu": not on_cuda, "torch_compile": run.mode == "compiled"}
    options |= {"gradient_checkpointing": run.activations == "checkpointed"}
    options |= {"max_length": sizes.seq} if run.trainer == "SFTTrainer" else {}
    options |= {"torch_compile_backend": "aot_eager"} if run.mode == "compiled" and not on_cuda else {}
    script = [ROOT / "benchmarks/trainer_run.py", run.trainer, folder / "model.json", text / "train.npy", sizes.seq]
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return list(map(str, [sys.executable, *(["-m", "fp8_ds.run"] if run.is_ours else []), *script, *words]))


def sizes_here() -> tuple[int, Any]:
    """Width and out_of_box.py's `Sizes` of the model: on a GPU 1.1 B parameters."""
    return (4096, WIDTHS[4096]._replace(layers=4)) if uses_cuda() else TINY


def summary(rows: Sequence[tuple[int, float, float, float | None]], said: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of a step and peak GiB, in FP8 or of a bf16 run, and of FP8's last steps, in bf16; the loss; and
    seconds of the first four steps, in which all is compiled but what the last steps need.

    Args:
        rows: written by trainer_run.py's `Clock`.
        said: lines of fp8_ds in the log.
    """
    found = re.findall(r"\(bf16_last_fraction: from step (\d+)\)", "\n".join(said))
    in_fp8 = int(found[-1]) if found else rows[-1][0]
    logs = [
        (step, 1000 * (end - start) / (step - before), gib, loss)
        for (before, start, _, _), (step, end, gib, loss) in pairwise(rows)
    ]
    usual = [(ms, gib) for step, ms, gib, _ in logs if WARM < step <= in_fp8]
    late = [(ms, gib) for step, ms, gib, _ in logs if step > in_fp8 + EVERY]
    return {
        "step_ms": round(median(ms for ms, _ in usual), 2),
        "bf16_ms": round(median(ms for ms, _ in late), 2) if late else None,
        "gib": round(max(gib for _, gib in usual), 2),
        "bf16_gib": round(max(gib for _, gib in late), 2) if late else None,
        "loss": round(fmean(loss for step, _, _, loss in logs if step > rows[-1][0] - LOSS_STEPS), 4),
        "first_s": round(rows[2][1] - rows[0][1], 1),
        "losses": [round(loss, 3) for _, _, _, loss in logs],
        "said": list(said),
    }


def run_one(run: Run, gpu: int, text: Path, limit: float, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit status of a run and its result, or "error"; with "wall_s"."""
    with tempfile.TemporaryDirectory() as folder:
        words, env = command(run, Path(folder), text, args.steps), environment(gpu)
        code, output, wall_s = run_logged(run.name, words, limit, args.log, env=env)
        if code == 0:
            clock = json.loads(Path(folder, "clock.json").read_text())
            result = summary(clock, re.findall(r"\[fp8_ds\] (.*)", output))
        else:
            result = {"error": error_of(code, output, limit).splitlines()[0][:300]}
    return code, {**result, "wall_s": wall_s}


def measure(runs: Sequence[Run], state: dict[str, Any], path: Path, text: Path, args: argparse.Namespace) -> None:
    """Take the runs that are missing, failed ones last, and write the state after each."""
    found, lock, free, num = state["runs"], Lock(), SimpleQueue[int](), num_gpus() or 1
    for gpu in range(num):
        free.put(gpu)

    def take(run: Run) -> None:
        gpu, left = free.get(), args.end - time.monotonic()
        alike = [found.get(one.name) for one in runs if (one.mode, one.is_ours) == (run.mode, run.is_ours)]
        needed = max([result["wall_s"] for result in alike if is_good(result)] or [EXPECTED[run.mode]])
        try:
            code, result = run_one(run, gpu, text, min(left, LIMIT), args) if left > needed else (ENDED, {})
        finally:
            free.put(gpu)
        if not result or (code == ENDED and left < LIMIT):
            print(f"{run.name}: left out, {left:.0f} s were left", flush=True)
            return
        with lock:
            found[run.name] = result
            write(path, state)
            print(f"{run.name}: {json.dumps(result)}", flush=True)

    todo = [run for run in runs if not is_good(found.get(run.name))]
    with ThreadPoolExecutor(num) as pool:
        list(pool.map(take, sorted(todo, key=lambda run: run.name in found)))


def cells(row: Sequence[Any], state: Mapping[str, Any]) -> list[str]:
    """Return the cells of a line of the table, as far as they are known."""
    bf16, ours = (state["runs"].get(Run(*row, is_ours).name) for is_ours in (False, True))
    about = [row[0], str(row[1]), row[2] + (", checkpointing" if row[3] == "checkpointed" else "")]
    if wrong := [result["error"] for result in (bf16, ours) if result is not None and "error" in result]:
        return [*about, f"**{wrong[0].replace('|', '/')}**"]
    if bf16 is None or ours is None:
        return [*about, "not measured"]
    speeds = [1000 * state["tokens"] / mean_ms(result) for result in (bf16, ours)]
    ms, gib = (f"{bf16[keys[0]]:.1f}; {', '.join(f'{ours[key]:.1f}' for key in keys if ours[key] is not None)}"
               for keys in (("step_ms", "bf16_ms"), ("gib", "bf16_gib")))  # fmt: skip
    loss = f"{bf16['loss']:.3f}; {100 * (ours['loss'] / bf16['loss'] - 1):+.2f}"
    plan = "; ".join(line for line in ours["said"] if re.match(r"fp8: \d+ of \d+ linears", line))
    shown = [f"{speeds[0]:,.0f}; {speeds[1]:,.0f}", f"{speeds[1] / speeds[0]:.2f}", ms, gib, loss]
    return [*about, *shown, f"{bf16['first_s']}; {ours['first_s']}", plan]


def table(rows: Sequence[Sequence[Any]], state: Mapping[str, Any]) -> str:
    """Markdown: a line for a run in bf16 and one in FP8."""
    titles = ["script", "ZeRO", "mode", "tokens/s of bf16; ours", "x", "ms of bf16; ours in FP8, in bf16"]
    titles += ["GiB of bf16; ours in FP8, in bf16", "loss of bf16; ours, % more", "s of 4 steps: bf16; ours", "in FP8"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for texts in (cells(row, state) for row in rows):
        lines.append(f"| {' | '.join(texts)} |" + " |" * (len(titles) - len(texts)))
    return "\n".join([*lines, "", "Tokens/s of ours: with the last 3 % of the steps in bf16.\n"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trainer and SFTTrainer with one key beside bf16.")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for the whole command")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="file of earlier pieces, of the same kind of GPU")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4],
        help="their numbers, from 1; the fifth is SFTTrainer compiled",
    )
    parser.add_argument("--steps", type=int, default=170, help="of which 5 are in bf16: two pairs after the change")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "end_to_end_text"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--log", type=Path, help="append all output of all runs to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.end, rows = time.monotonic() + args.budget, [ROWS[number - 1] for number in args.rows]
    path = dated_stem(args.out, "trainer").with_suffix(".json")
    state: dict[str, Any] = json.loads(args.resume.read_text()) if args.resume else {"runs": {}}
    if args.budget > 0:
        kind, size, most = ("bpe", VOCAB, 24_000_000) if uses_cuda() else ("bytes", 256, 400_000)
        text, cache = prepare(args.cache / f"{kind}-{size}-{most}", kind, size, 0, most)
        _, sizes = sizes_here()
        about = {"text": text.describe(), "steps": args.steps, "tokens": sizes.seq * sizes.micro_batch}
        if args.resume and (before := {key: state[key] for key in about}) != about:
            raise SystemExit(f"--resume: expected runs of {about}, got {before}. Leave it out.")
        state = {"machine": machine(("trl", "datasets")), **about} | state
        measure([Run(*row, is_ours) for row in rows for is_ours in (False, True)], state, path, cache, args)
    write(path, state)
    text_of_table = heading(path.stem) + table(rows, state)
    path.with_suffix(".md").write_text(text_of_table)
    print(text_of_table)


if __name__ == "__main__":
    main()
