"""Megatron's pretrain_gpt.py of a real clone: stock beside ours. Tokens/s, memory, losses, tensor parallelism.

    python benchmarks/megatron_pretrain.py --piece speed --out $OUT              # at most ten minutes on one H200
    python benchmarks/megatron_pretrain.py --piece states --out $OUT             # forms (a) and (b) of the optimizer
    python benchmarks/megatron_pretrain.py --piece losses --out $OUT             # 500 iterations on text; CSV and PNG
    python benchmarks/megatron_pretrain.py --piece seeds-1 --out $OUT            # the same with another seed; -2, -3
    python benchmarks/megatron_pretrain.py --piece tp2 --out $OUT                # two GPUs
    python benchmarks/megatron_pretrain.py --arms ours-b+bf16grads --reference stock-tensorwise
    python benchmarks/megatron_pretrain.py --print stock-blockwise ours-b        # the commands, and stop
    python benchmarks/megatron_pretrain.py --report FETCHED.json ...             # adds runs from elsewhere
    python benchmarks/megatron_pretrain.py --model tiny-llama --arms stock-bf16 ours-a --iterations 6 --on-cpu

The clone (core_v0.16.1) is --megatron-path or $MEGATRON_LM_PATH. Arms and pieces: megatron_pretrain_arms.py. Each arm
is torchrun of its own: stock arms run the clone's script as it is, ours `-m megatron_patches.pretrain_gpt`, and they
differ in the words of that table only. A piece that compares speed measures its reference first and last; ratios are
taken within a piece. Losses of runs with equal settings are put together. An arm that fails is recorded with the end
of its log, one that no longer fits into `--budget` is left out with a line. Each call appends a run to one dated JSON
and makes the table and the pictures from it. Calls side by side need an --out and a --cache each.

Llama 2.0 B: 8 layers of Llama-3-8B, vocabulary 32,000, sequences of 4096, micro-batch 2, no accumulation, distributed
optimizer, gradients clipped at 1, CUDA_DEVICE_MAX_CONNECTIONS=1, Transformer Engine's attention by cuDNN
(--attention-backend fused). Everything measured is Megatron's own log: times are medians over lines of 5 iterations
after 10 that warm up; memory is torch.cuda.max_memory_allocated since the process began (--log-memory-interval), so
building counts; losses are those of each iteration. Speed reads Megatron's mock data, the other pieces the sources of
the Python standard library as bytes (examples/megatron/prepare_data.py). "parallel" draws weights on the CPU, which
makes them the same for any number of ranks. Moments and masters: ours-a and ours-b in megatron_pretrain_arms.py.

Predictions, written before the first run on an H200. Of stock: what was measured there for DESIGN.md.

One GPU, 8192 tokens (tokens/s; peak GiB):
- stock-tensorwise 51.5k; 46.7. bf16 40.1k; 44.8. blockwise 47.5k; 46.8. fp8-states 11.2k; 41.2. The best is tensorwise,
  so the targets are 56.7k tokens/s, 30.4 GiB with form (a) and 23.4 with form (b).
- ours-fa3 51.5k; 46.7: cuDNN's attention is as good. ours-fa3_fp8 52.0k; 46.3: 1.5 ms of 159 less, q, k and v in bytes.
- ours-a 54.5k; 30.0. A step of Adam moves 34 bytes a parameter in stock (16 ms, the norm included) and 18 in ours
  (9 ms). Weights 2, gradients 4, masters 1, moments 2.06: 16.9 GiB; Transformer Engine's FP8 weights and their
  transposes 3.2, activations and logits 9.8: 0.64 of stock's. With bf16grads 57.5k; 26.2: 0.56.
- ours-b 55.2k; 28.3: no weight is cast, but transposed. b11 55.4k; 26.4. b11+bf16grads 58.5k; 23.0, which is 0.49. So
  1.1 x needs gradients in bf16, and so does form (b)'s memory. stock-bf16-states 52k; 35.5.
- ours-b11+bf16grads+drop, predicted on 2026-11-24 from the others: 20.7 GiB, 0.49 of stock-tensorwise+bf16grads, and
  the speed of ours-b11+bf16grads within 1 %, for as many transposes are made.
- stock-tensorwise+bf16grads, predicted when the others had been measured: 52.5k; 42.0, by what the option gave ours-a.
- TP=2, ours-a: 0.85 of one GPU's tokens/s a GPU; losses of 60 iterations within 0.5 % of one GPU's.
- Losses after 500 iterations: tensorwise, ours-a and ours-b within 0.5 % of stock-bf16's held-out loss.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import end_to_end_report
import megatron_pretrain_report as report
from end_to_end import ERROR_CHARS, machine
from end_to_end_arms import MODELS, Model
from megatron_pretrain_arms import (
    EVAL_ITERS,
    GRAMMAR,
    INTERVAL,
    ITERATIONS,
    MODES,
    PIECES,
    Arm,
    Piece,
    Settings,
    parse_arm,
    predicted_seconds,
    words_of,
)
from megatron_pretrain_log import held_out_loss, lines_of, losses_of, measured
from results_io import ROOT, command_line, dated_stem, without_folders

from fp8_ds.testing.processes import ENDED, run_or_end
from megatron_patches.cpu import copy_helper

HERE = Path(__file__).resolve().parent
EXAMPLES = ROOT / "examples" / "megatron"
PACKAGES = ("megatron-core", "transformer-engine", "fa3-fwd", "flash-attn-3")
WARM_UP = 10
GRACE_SECONDS = 40
"""In which torchrun ends its ranks when it is told to: they are sessions of their own."""


# --- one arm ---


def command_of(arm: Arm, clone: Path, words: list[str], on_cpu: bool) -> list[str]:
    """torchrun of the clone's script, or of our wrapper around it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arm.tp)]
    if arm.is_ours:
        return [*launcher, "-m", "megatron_patches.pretrain_gpt", "--megatron-path", str(clone), *words]
    if on_cpu:
        return [*launcher, str(HERE / "megatron_stock_on_cpu.py"), str(clone), *words]
    return [*launcher, str(clone / "pretrain_gpt.py"), *words]


def environment(clone: Path, on_cpu: bool) -> dict[str, str]:
    """The same for all arms."""
    env = dict(os.environ)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        env.pop(name, None)  # Megatron asserts that --attention-backend has set them
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    env.setdefault("OMP_NUM_THREADS", "1")
    if list(clone.glob("megatron/core/datasets/helpers_cpp*.so")):
        env["MAKEFLAGS"] = "n"  # Megatron runs `make` for this helper, which would compile it again without pybind11
    if on_cpu:
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def error_of(code: int, log: str, limit: float) -> str:
    """First line: the reason; then the end of the log."""
    told = [line for line in log.splitlines() if re.search(r"(Error|Exception|Exit)\b.*: ", line)]
    told = [line for line in told if "ChildFailedError" not in line and "torch/distributed/elastic" not in line]
    reason = f"no end after {limit:.0f} s" if code == ENDED else f"exit status {code}"
    return without_folders(f"{reason}: {told[-1].strip() if told else 'no error in its log'}\n{log[-ERROR_CHARS:]}")


def result_of(log: str, arm: Arm, m: Model, s: Settings, mode: str, warm_up: int) -> dict[str, Any]:
    """What a run that has ended well says in its log."""
    found = measured(log, warm_up, m.tokens, arm.tp)
    if mode != "speed":
        found["losses"] = sorted(losses_of(lines_of(log)).items())
        found["held_out_loss"] = held_out_loss(log)
    return found


def run_arm(arm: Arm, m: Model, s: Settings, mode: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The result of one arm, or "error": what it lacks, that it ran too long, or the end of its log.

    Args:
        limit: seconds after which all its processes are ended.
    """
    began = time.monotonic()
    if arm.needs_te and importlib.util.find_spec("transformer_engine") is None:
        return {"error": "NOT INSTALLED: transformer_engine, whose layers this arm runs.", "wall_s": 0.0}
    command = command_of(arm, args.megatron_path, words_of(arm, m, s, args.cache / "indices"), s.on_cpu)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "log")
        environ = environment(args.megatron_path, s.on_cpu)
        with output.open("w") as file, tempfile.TemporaryDirectory() as empty:
            streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
            code = run_or_end(command, limit, grace=GRACE_SECONDS, env=environ, cwd=empty, **streams)
        log = output.read_text(errors="replace")
    if args.log is not None:
        with args.log.open("a") as file:
            file.write(f"===== {arm.name}: exit status {code}\n{log}\n")
    try:
        result = {"error": error_of(code, log, limit)} if code else result_of(log, arm, m, s, mode, args.warm_up)
    except ValueError as error:  # it ended well, and has logged nothing that counts
        result = {"error": f"{error}\n{without_folders(log[-ERROR_CHARS:])}"}
    return {**result, "words": without_folders(" ".join(arm.words)), "wall_s": round(time.monotonic() - began, 1)}


# --- a piece ---


def prepare_clone(clone: Path) -> None:
    """Megatron's compiled dataset helper is in the clone, if a megatron-core of this Python has it.

    Raises:
        SystemExit: it is no clone.
    """
    if not (clone / "pretrain_gpt.py").is_file():
        raise SystemExit(
            "--megatron-path: expected a clone of Megatron-LM, got a folder without pretrain_gpt.py. Clone it, check "
            "out core_v0.16.1, and pass its folder or set $MEGATRON_LM_PATH."
        )
    copy_helper(clone / "megatron" / "core" / "datasets")


def prepare_text(folder: Path, clone: Path) -> str:
    """Text is in `folder`; what the result says about it."""
    about = folder / "about.txt"
    if not about.exists():
        command = [sys.executable, EXAMPLES / "prepare_data.py", folder, "--megatron-path", clone]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        tokens = [f"{Path(path).name} {count}" for path, count in re.findall(r"^(.*): ([\d,]+) tokens", told, re.M)]
        about.write_text(f"sources of the Python standard library, bytes: {', '.join(tokens)} tokens")
    return about.read_text()


def versions(clone: Path) -> dict[str, str]:
    """Of what only Megatron's arms need."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", _package_info(clone), re.M))
    found["clone of Megatron-LM"] = ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))
    return found


def _package_info(clone: Path) -> str:
    return (clone / "megatron" / "core" / "package_info.py").read_text()


def common_words(arms: Iterable[Arm], m: Model, s: Settings) -> list[str]:
    """What all of `arms` have; no seed, if they have their own."""
    words = words_of(Arm("", "stock-bf16", ()), m, s, Path("indices"))
    if any(arm.seed != Arm.seed for arm in arms):
        at = words.index("--seed")
        del words[at : at + 2]
    return words


def chosen_piece(args: argparse.Namespace) -> tuple[str, Piece]:
    """(name, what to measure)."""
    if args.piece:
        return args.piece, PIECES[args.piece]
    reference = args.reference if args.mode == "speed" else None
    names = [name for part in args.arms for name in part.split(",") if name != reference]
    return args.mode, Piece(args.model, reference, tuple(names), args.mode)


def chosen_settings(args: argparse.Namespace, mode: str) -> Settings:
    return Settings(
        iterations=args.iterations or ITERATIONS[mode],
        interval=args.interval if mode == "speed" else INTERVAL[mode],
        eval_iters=EVAL_ITERS[mode],
        text=None if mode == "speed" else args.cache / "text",
        cpu_init=mode == "parallel",
        on_cpu=args.on_cpu,
        extra=tuple(shlex.split(args.extra)),
    )


def chosen_model(args: argparse.Namespace, piece: Piece) -> Model:
    """The piece's model with what the command line changes."""
    changes = {key: getattr(args, key) for key in ("layers", "seq", "micro_batch")}
    return replace(MODELS[piece.model], **{key: value for key, value in changes.items() if value is not None})


def run_piece(
    piece: Piece,
    budget: float,
    run: Callable[[str, float], dict[str, Any]],
    predict: Callable[[str, Mapping[tuple[str, str], float]], float],
    known: Mapping[tuple[str, str], float],
    clock: Callable[[], float] = time.monotonic,
    save: Callable[[list[dict[str, Any]], list[str]], None] = lambda results, skipped: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Reference, arms, reference again (in mode "speed"); what does not fit any more is skipped.

    The first arm goes before the reference's second run, which shows nothing without an arm.

    Args:
        budget: seconds for all.
        run: (name, seconds left) to a result with `wall_s`.
        predict: (name, known) to the seconds that an arm will take.
        known: (name, mode) to the seconds that arms took before; what is measured here is added.
        save: called after every arm.

    Returns:
        (results in order, each with its "arm"; lines about what was skipped).
    """
    known, results, skipped = dict(known), [], []
    began = clock()
    first = [piece.reference] if piece.reference else []
    last = first if piece.mode == "speed" and piece.arms else []
    names = [*first, *piece.arms, *last]
    for number, name in enumerate(names):
        has_arm = len(results) > len(first)
        if number == len(names) - 1 and last and not has_arm:
            break
        kept = last if number < len(names) - 1 and has_arm else []
        left, needed = budget - (clock() - began), sum(predict(some, known) for some in (name, *kept))
        if results and needed > left:
            skipped.append(
                f"{name}: left out, it takes {needed:.0f} s{' with the reference' if kept else ''}, {left:.0f} are left"
            )
            print(skipped[-1], flush=True)
            continue
        result = {"arm": name, **run(name, left)}
        if "error" not in result:
            known[name, piece.mode] = result["wall_s"]
        results.append(result)
        print(report.line(result), flush=True)
        save(results, skipped)
    save(results, skipped)
    return results, skipped


def measure(args: argparse.Namespace) -> Path:
    """Runs a piece; returns the JSON to which it was appended."""
    began = time.monotonic()
    name, piece = chosen_piece(args)
    m, s = chosen_model(args, piece), chosen_settings(args, piece.mode)
    arms = {arm: parse_arm(arm) for arm in filter(None, (piece.reference, *piece.arms))}
    for arm in arms.values():
        words_of(arm, m, s, args.cache)  # refused now, not when its turn comes
    args.cache.mkdir(parents=True, exist_ok=True)
    prepare_clone(args.megatron_path)
    text = prepare_text(s.text, args.megatron_path) if s.text else None
    path = dated_stem(args.out, report.NAME).with_suffix(".json")
    earlier = end_to_end_report.load(path)
    box = machine()
    box["versions"] |= versions(args.megatron_path)
    run: dict[str, Any] = {
        "id": datetime.datetime.now(datetime.timezone.utc).strftime(report.ID_FORMAT),
        "piece": name,
        "mode": piece.mode,
        "model": {"name": piece.model, **vars(m)},
        "reference": piece.reference,
        "timing": f"{s.iterations} iterations, lines of {s.interval}, those after {args.warm_up} count",
        "text": text,
        "words": without_folders(" ".join(common_words(arms.values(), m, s))),
        "command": command_line(),
        "machine": box,
    }

    def one(arm: str, left: float) -> dict[str, Any]:
        return run_arm(arms[arm], m, s, piece.mode, args, min(args.arm_timeout, max(left, 30)))

    def predict(arm: str, known: Mapping[tuple[str, str], float]) -> float:
        return predicted_seconds(arms[arm], m, piece.mode, s, known)

    def save(results: list[dict[str, Any]], skipped: list[str]) -> None:
        end_to_end_report.write(path, [*earlier, {**run, "results": results, "skipped": skipped}])

    known = report.known_seconds(earlier, run["model"], run["timing"])
    run_piece(piece, args.budget - (time.monotonic() - began), one, predict, known, save=save)
    return path


def printed_commands(args: argparse.Namespace) -> str:
    """Of the arms of --print, one a line; as --mode would run them."""
    m, s = chosen_model(args, Piece(args.model, None, ())), chosen_settings(args, args.mode)
    commands = []
    for name in args.print:
        arm = parse_arm(name)
        words = words_of(arm, m, s, args.cache / "indices")
        commands.append(shlex.join(command_of(arm, args.megatron_path, words, s.on_cpu)))
    return "\n".join(commands)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog=f"Arms: {GRAMMAR}.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--piece", choices=list(PIECES))
    what.add_argument("--arms", nargs="+", help="separated by spaces or commas")
    what.add_argument("--print", nargs="+", metavar="ARM", help="print their commands and stop")
    what.add_argument("--report", nargs="*", type=Path, metavar="JSON", help="measure nothing; add these files' runs")
    how = parser.add_argument_group("how")
    how.add_argument("--megatron-path", type=Path, help="clone of Megatron-LM; default: $MEGATRON_LM_PATH")
    how.add_argument("--mode", choices=MODES, default="speed", help="of --arms and --print; a piece has its own")
    how.add_argument("--model", choices=list(MODELS), default="llama-2b", help="of --arms and --print")
    how.add_argument("--reference", metavar="ARM", help="is measured before and after --arms")
    how.add_argument("--iterations", type=int, help=f"of an arm; default by mode: {ITERATIONS}")
    how.add_argument("--interval", type=int, default=INTERVAL["speed"], help="iterations in a line of speed's log")
    how.add_argument("--warm-up", type=int, default=WARM_UP, help="iterations that do not count")
    for name in ("layers", "seq", "micro-batch"):
        how.add_argument(f"--{name}", type=int, help="instead of the model's")
    how.add_argument("--extra", default="", help="more arguments of Megatron, for all arms, as one word")
    how.add_argument("--on-cpu", action="store_true", help="a dry run over gloo; nothing of it is a measurement")
    how.add_argument("--budget", type=float, default=570, help="seconds for the whole command")
    how.add_argument("--arm-timeout", type=float, default=300)
    how.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "megatron_pretrain"))
    how.add_argument("--out", type=Path, default=HERE / "results")
    how.add_argument("--log", type=Path, help="append all output of all arms to this file")
    args = parser.parse_args()
    args.cache = args.cache.resolve()
    if args.report is None:
        given = args.megatron_path or os.environ.get("MEGATRON_LM_PATH")
        if not given:
            parser.error("--megatron-path: expected a clone of Megatron-LM, got none and no $MEGATRON_LM_PATH")
        args.megatron_path = Path(given).expanduser().resolve()
    return args


def main() -> None:
    args = parse_args()
    if args.print:
        print(printed_commands(args))
        return
    path = report.merged(args.out, args.report) if args.report is not None else measure(args)
    print(report.publish(path))


if __name__ == "__main__":
    main()
