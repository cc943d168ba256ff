"""Megatron's pretrain_gpt.py of a real clone: stock beside ours. Tokens/s, memory, losses, tensor parallelism.

    python benchmarks/megatron_pretrain.py --arms stock-tensorwise ours-a ours-b11+bf16grads stock-tensorwise
    python benchmarks/megatron_pretrain.py --mode losses --arms stock-tensorwise+seed=1 ours-a+seed=1    # on text; CSV
    python benchmarks/megatron_pretrain.py --mode parallel --arms ours-a ours-a+tp=2                     # two GPUs
    python benchmarks/megatron_pretrain.py --model tiny-llama --arms stock-bf16 ours-a --iterations 14 --on-cpu

The clone (core_v0.16.1) is --megatron-path or $MEGATRON_LM_PATH. Arms: megatron_pretrain_arms.py. Each is a torchrun of
its own: stock arms run the clone's script as it is, ours `-m megatron_patches.pretrain_gpt`, and they differ in the
words of that table only. Ratios are to the first arm; name it last, too, for the drift of the machine. An arm that
fails is recorded with the end of its log. Each call adds a run to one dated JSON and writes the table of all of them;
losses of an arm go into a CSV beside it, for `fp8-ds compare`. Calls side by side need an --out and a --cache each.

Llama 2.0 B: 8 layers of Llama-3-8B, vocabulary 32,000, sequences of 4096, micro-batch 2, no accumulation, distributed
optimizer, gradients clipped at 1, CUDA_DEVICE_MAX_CONNECTIONS=1, Transformer Engine's attention by cuDNN
(--attention-backend fused). Everything measured is Megatron's own log: times are medians over lines of 5 iterations
after 10 that warm up; memory is torch.cuda.max_memory_allocated since the process began (--log-memory-interval), so
building counts; losses are those of each iteration. Speed reads Megatron's mock data, the other modes the sources of
the Python standard library as bytes (examples/megatron/prepare_data.py). "parallel" draws weights on the CPU, which
makes them the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from end_to_end import machine
from end_to_end_arms import MODELS, Model
from megatron_pretrain_arms import GRAMMAR, Arm, Settings, parse_arm, words_of
from megatron_pretrain_log import held_out_loss, lines_of, losses_of, measured
from processes import ERROR_CHARS, error_of, run_logged
from results_io import ROOT, command_line, dated_stem, without_folders

from megatron_patches.compat import version_of_clone
from megatron_patches.cpu import copy_helper
from megatron_patches.pretrain_gpt import find_clone

HERE = Path(__file__).resolve().parent
EXAMPLES = ROOT / "examples" / "megatron"
PACKAGES = ("megatron-core", "transformer-engine", "fa3-fwd", "flash-attn-3")
ITERATIONS = {"speed": 40, "losses": 500, "parallel": 60}
"""By --mode, those that warm up included."""
INTERVAL = {"speed": 5, "losses": 1, "parallel": 1}
EVAL_ITERS = {"speed": 0, "losses": 20, "parallel": 4}
GRACE_SECONDS = 40
"""In which torchrun ends its ranks when it is told to: they are sessions of their own."""


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


def run_arm(arm: Arm, m: Model, s: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """The result of one arm, or "error": what it lacks, that it ran too long, or the end of its log."""
    if arm.needs_te and importlib.util.find_spec("transformer_engine") is None:
        return {"error": "NOT INSTALLED: transformer_engine, whose layers this arm runs."}
    command = command_of(arm, args.megatron_path, words_of(arm, m, s, args.cache / "indices"), s.on_cpu)
    env = environment(args.megatron_path, s.on_cpu)
    with tempfile.TemporaryDirectory() as empty:
        options = {"grace": GRACE_SECONDS, "env": env, "cwd": empty}
        code, log, seconds = run_logged(arm.name, command, args.arm_timeout, args.log, **options)
    if code:
        return {"error": error_of(code, log, args.arm_timeout), "wall_s": seconds}
    try:
        found = measured(log, args.warm_up, m.tokens, arm.tp)
        if args.mode != "speed":
            found |= {"losses": sorted(losses_of(lines_of(log)).items()), "held_out_loss": held_out_loss(log)}
    except ValueError as error:  # it ended well, and has logged nothing that counts
        found = {"error": f"{error}\n{without_folders(log[-ERROR_CHARS:])}"}
    return {**found, "words": without_folders(" ".join(arm.words)), "wall_s": seconds}


def prepare_text(folder: Path, clone: Path) -> str:
    """Write text into `folder`, unless it is there; what the result says about it."""
    about = folder / "about.txt"
    if not about.exists():
        command = [sys.executable, EXAMPLES / "prepare_data.py", folder, "--megatron-path", clone]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        tokens = [f"{Path(path).name} {count}" for path, count in re.findall(r"^(.*): ([\d,]+) tokens", told, re.M)]
        about.write_text(f"sources of the Python standard library, bytes: {', '.join(tokens)} tokens")
    return about.read_text()


def table(run: Mapping[str, Any]) -> str:
    """Markdown: a line for each arm in the order they ran; ratios are to the first, losses to the first of a seed."""
    good = [result for result in run["results"] if "error" not in result]
    first: dict[int, Mapping[str, Any]] = {}
    for result in good:
        first.setdefault(parse_arm(result["arm"]).seed, result)
    names = ["arm", "ms/iteration", "tokens/s a GPU", "of the first", "peak GiB", "of the first", "TFLOP/s a GPU"]
    names += ["last loss"] if run["mode"] == "speed" else ["first loss", "mean of the 2nd half", "held out", "of first"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for r in run["results"]:
        if "error" in r:
            reason = r["error"].splitlines()[0][:200].replace("|", "/")
            lines.append(f"| {r['arm']} | **{reason}** |" + " |" * (len(names) - 2))
            continue
        speed, peak = r["tokens_per_second_per_gpu"], r["peak_allocated_gib"]
        speed_ratio = speed / good[0]["tokens_per_second_per_gpu"]
        peak_ratio = peak / (good[0]["peak_allocated_gib"] or float("nan"))  # on a CPU none is known
        name = r["arm"] if r["finite"] else f"{r['arm']}, **not finite**"
        cells = [name, f"{r['step_ms']:.1f}", f"{speed:,.0f}", f"{speed_ratio:.3f}", f"{peak:.2f}"]
        cells += [f"{peak_ratio:.3f}", f"{r['tflops_per_gpu'] or 0:.0f}"]
        if run["mode"] == "speed":
            cells.append(f"{'none' if r['loss'] is None else format(r['loss'], '.3f')}")
        else:
            losses = [loss for _, loss in r["losses"]]
            change = 100 * (r["held_out_loss"] / first[parse_arm(r["arm"]).seed]["held_out_loss"] - 1)
            cells += [f"{losses[0]:.4f}", f"{fmean(losses[len(losses) // 2 :]):.4f}"]
            cells += [f"{r['held_out_loss']:.4f}", f"{change:+.2f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(run: Mapping[str, Any]) -> str:
    """Markdown: what the run was, and its table."""
    m, box = run["model"], run["machine"]
    found = ", ".join(f"{name} {version}" for name, version in box["versions"].items())
    lines = [
        f"## {run['mode']}, {m['name']}",
        "",
        f"`{run['command']}` on {box['num_gpus']} x {box['device']}; {found}, Python {box['python']}, CUDA "
        f"{box['cuda']}. {m['layers']} layers, hidden {m['hidden']}, ffn {m['ffn']}, vocab {m['vocab']}, seq "
        f"{m['seq']}, micro-batch {m['micro_batch']}; {run['timing']}. Text: {run['text'] or 'mock data'}.",
        *("", table(run), ""),
        *(f"- {r['arm']}: `{r['words']}`" for r in run["results"] if r.get("words")),
    ]
    return "\n".join(lines) + "\n"


def write_losses(stem: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """A CSV for each arm, as `fp8-ds compare` reads it."""
    for result in results:
        if "losses" in result:
            with stem.with_name(f"{stem.name}-{result['arm']}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("iteration", "loss"), *result["losses"]])


def settings_of(args: argparse.Namespace) -> tuple[Model, Settings]:
    changes = {key: getattr(args, key) for key in ("layers", "seq", "micro_batch")}
    model = replace(MODELS[args.model], **{key: value for key, value in changes.items() if value is not None})
    return model, Settings(
        iterations=args.iterations or ITERATIONS[args.mode],
        interval=INTERVAL[args.mode],
        eval_iters=EVAL_ITERS[args.mode],
        text=None if args.mode == "speed" else args.cache / "text",
        cpu_init=args.mode == "parallel",
        on_cpu=args.on_cpu,
        extra=tuple(shlex.split(args.extra)),
    )


def measure(args: argparse.Namespace) -> str:
    """Run the arms; returns what was written after each of them."""
    m, s = settings_of(args)
    arms = [parse_arm(name) for name in args.arms]
    for arm in arms:
        words_of(arm, m, s, args.cache)  # refused now, not when its turn comes
    args.cache.mkdir(parents=True, exist_ok=True)
    copy_helper(args.megatron_path / "megatron" / "core" / "datasets")
    stem = dated_stem(args.out, "megatron-pretrain")
    path = stem.with_suffix(".json")
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    box = machine(PACKAGES)
    box["versions"]["clone of Megatron-LM"] = str(version_of_clone(args.megatron_path))
    run: dict[str, Any] = {"mode": args.mode, "model": {"name": args.model, **vars(m)}, "command": command_line()}
    run |= {"machine": box, "text": prepare_text(s.text, args.megatron_path) if s.text else None, "results": []}
    run["timing"] = f"{s.iterations} iterations, lines of {s.interval}, those after {args.warm_up} count"
    for arm in arms:
        run["results"].append({"arm": arm.name, **run_arm(arm, m, s, args)})
        runs = [*earlier, run]
        path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        text = f"# {stem.name}\n\n" + "\n".join(section(one) for one in runs)
        stem.with_suffix(".md").write_text(text)
        print(table(run).splitlines()[-1], flush=True)
    if args.mode != "speed":
        write_losses(stem, run["results"])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(epilog=f"Arms: {GRAMMAR}.")
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--megatron-path", help="clone of Megatron-LM; else $MEGATRON_LM_PATH, else here")
    parser.add_argument("--mode", choices=list(ITERATIONS), default="speed")
    parser.add_argument("--model", choices=list(MODELS), default="llama-2b")
    parser.add_argument("--iterations", type=int, help=f"of an arm; default by mode: {ITERATIONS}")
    parser.add_argument("--warm-up", type=int, default=10, help="iterations that do not count")
    for name in ("layers", "seq", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, help="instead of the model's")
    parser.add_argument("--extra", default="", help="more arguments of Megatron, for all arms, as one word")
    parser.add_argument("--on-cpu", action="store_true", help="a dry run over gloo; nothing of it is a measurement")
    parser.add_argument("--arm-timeout", type=float, default=300)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "megatron_pretrain"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--log", type=Path, help="append all output of all arms to this file")
    args = parser.parse_args()
    args.cache = args.cache.resolve()
    args.megatron_path = find_clone(args.megatron_path, os.environ.get("MEGATRON_LM_PATH"), Path.cwd())
    print(measure(args))


if __name__ == "__main__":
    main()
