"""Whole training steps: ours beside stock DeepSpeed, plain torch and torchao. Speed, memory, losses, profiles.

    python benchmarks/end_to_end.py --piece peers --out $OUT             # at most ten minutes on one H200
    python benchmarks/end_to_end.py --piece 8b --out $OUT                # four
    python benchmarks/end_to_end.py --model llama-2b --reference stock-eager --arms ours-e4m11-compiled+rowwise
    python benchmarks/end_to_end.py --model llama-2b --profile stock-eager ours-e4m11-compiled
    python benchmarks/end_to_end.py --model llama-2b --losses stock-eager ours-e4m11-eager
    python benchmarks/end_to_end.py --report FETCHED.json ...            # adds runs from elsewhere; table and chart
    python benchmarks/end_to_end.py --model tiny-llama --arms stock-eager ours-e4m11-eager --steps 2    # on CPU

Models and the names of arms: end_to_end_arms.py. Pieces: end_to_end_pieces.py. Every arm is a process of its own;
DeepSpeed's arms are started by the `deepspeed` launcher and differ in the "fp8" block only (stage and buckets: `ZERO`
of end_to_end_arms.py), or in what their names say. A piece measures its reference first and last, and ratios are taken
within it. A step's time is the median of 3 blocks of 10 steps after a warm-up; tokens are random and uniform; gradients
are clipped at norm 1 in all arms. An arm that fails is recorded with the end of its log, one that no longer fits into
`--budget` is left out with a line, the rest goes on. Each call appends a run to one dated JSON and makes table and
chart from it. Losses: the whole model (8 layers), 200 steps, learning rate 3e-4 after 20 steps of warm-up, text of
parity/data.py, the same windows for all arms.

Predictions, written before the first run on an H200. Of peers: what was measured there for DESIGN.md.

Llama 2.0 B, one GPU, 8192 tokens a step (ms; tokens/s; peak GiB), stock cross entropy, no fused activations:
- stock-eager 253; 32.4k; 42.3. stock-compiled 221; 37.1k; 41.2. torch-compiled 197; 41.6k; 38.2.
- torchao-tensorwise-compiled 156; 52.6k; 32.2. With AdamWFp8 149; 55.1k; 16.5. Clipping costs 2 to 3 ms of these.
- ours-e4m11-compiled 114; 72k; 17.0. Time: GEMMs 68, attention 16, casts and elementwise 22, the step and all around
  it 8, no idle. Memory, at the end of forward: weights and states 7.8, activations 7.4 (944 MiB a layer: 208 of FP8
  inputs, 448 gate and up, 160 attention, 128 residuals), logits 1.5. So 16 needs Liger's loss, or gate and up in FP8.
- ours-e4m19-compiled 115; 71k; 18.7. Release 116; 70.5k; 16.5: gradients are not what peaks at this size.
- ours-e4m11-eager 155; 53k; 21: 41 ms of unfused elementwise where compiled fuses 22. ours-fp32-eager 200; 41k; 39.
  ours-fp32-compiled 165; 50k; 38 (AdamW 16, DeepSpeed's own copies and norms 25).
- recipes, compiled, against tensorwise: delayed -6 ms (no amax pass), rowwise -3, rowwise_with_gw_hp +22 (a third of
  the GEMMs in bf16), blockwise +12 (GEMMs at 85 %). activations.fused works in eager only: -25 ms and 17.5 GiB for
  tensorwise, delayed and rowwise; with nonlinear fp8 -20 ms and 15.5 GiB.
- Of the 57 ms that DeepSpeed spends outside the model's kernels at most 8 remain. No wait of the host in forward and
  backward that stock has not. At most 20 dispatches a linear.
- Since tables of rotary embeddings are made once a step (predicted before its first run on an H200): compiled+fused
  123, with delayed scales 119.5, with Liger's loss besides 119 and 14.5. Release, layers compiled one by one, inputs
  of norms and SwiGLUs in FP8, Liger's loss: 122; 12.5.
- As CUDA graphs (piece graphs): 118 against 120.5, of which 2.6 were gaps between kernels and before the forward.
- With FlashAttention-3 (piece fastest): attention 15.5 ms for 17.5, so 118.5 against 120.5; as CUDA graphs 116.5.
  Measured on 2026-11-23: 121.0 against 123.3, for torch 2.11's graphs had no tables, and 120.2 with none replayed, for
  delayed scales were written where a CUDA graph may not write. Both mended, predicted: 113 with delayed scales, 116.5
  tensorwise; 119 without FlashAttention-3; 124 with neither.
- Since the model hands out its loss alone (its logits took a gradient of zeros: filled, copied into the graph, added),
  SwiGLU's columns are written where they are computed, both planes by tiles of words, the norm in long programs and
  half as many small operators between two steps (piece fastest, 2026-11-23, late): delayed 113.8, tensorwise 117.5;
  stock and torchao within 0.3. Peak of the compiled tensorwise arm 15.5 for 16.01.
- Since SwiGLU's columns are written beside its gradients, and norms in graphs keep FP8 where asked (late on
  2026-11-23): delayed 113.7, tensorwise 117.6; release's peak 12.87 for 13.59. Measured 113.9, 117.5 and 13.04, which
  the eager final norm explains: compiled 12.86 by peak_on_cpu.py, 12.87 measured.
- Since the update takes 60 instructions an element for 68 (piece precise, 2026-11-26, without FlashAttention-3):
  compiled+fused 119.5 for 118.3 to 121.8, as CUDA graphs 118; that with ends in bf16 and E4M3 gradients 131.
- What was the headline, ends in bf16 with fast sums but for grad_weight, as CUDA graphs: on an H200 133 ms (1.94 x
  DeepSpeed), on an H100 135.5 (measured 137.5, 2.04 x, 2026-11-26); the last layer's attention alone in bf16 121 and
  124, with all sums fast 119 and 122.5.
- The headline since 2026-11-28, delayed scales and the last 3 % of a run in bf16 (piece last-steps), masters decoded by
  one kernel: 174 ms a step of these, 112.6 in the mean of a run. Measured 173.7 and 111.8.
- Liger's cross entropy, all arms: peak -1.5 GiB (no whole logits), time within 2 ms.

Llama-3-8B, 4 GPUs, ZeRO-3, 8192 tokens a step and GPU (tokens/s a GPU; peak GiB): stock-eager 8.0k; 94. FSDP2 bf16
compiled 9.7k; 71. torchao-tensorwise-compiled with float8 gathers 11.7k; 65. ours-e4m11-compiled 15.0k (546 ms); 49,
of which 9.8 are logits in bf16, float32 and their gradient: 45 needs Liger's loss. Eager 12.0k; 58. In stock's memory
ours takes micro-batch 2, and then 15.6k.
All of it on two GPUs, by the 8 layers measured there: ours 680 ms, 12.0k; stock 1,100; torchao 876.
On four, by all of it on two (605, 1,018 and 746 ms): ours 585, 14.0k, 41 GiB; stock 1,000, 82 GiB; torchao 715.
With the headline's recipe, and weights and gradients sent without copies (piece 8b-channels): 532. Measured 508.6.

GPT-2 small (16 x 1024): all layers in FP8 0.80 of stock-eager (K = 768 is too short for the casts), measured 1.00 to
1.05; compiled 0.95 and 1.02 of stock-compiled.

Losses after 200 steps: e4m19 and fp32 within 0.5 % of stock's held-out loss, e4m11 within 1 %, recipes alike.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import end_to_end_report
import torch
from end_to_end_arms import GRAMMAR, MODELS, Arm, Model, ds_config, parse_arm, sized
from end_to_end_pieces import PIECES, Piece, Timing, predicted_seconds
from results_io import ROOT, command_line, dated_stem, device_name, without_folders

from fp8_ds.device import num_gpus, uses_cuda
from fp8_ds.launcher import free_port, which_gpus
from fp8_ds.testing.processes import ENDED, run_or_end

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "deepspeed", "transformers", "torchao", "liger-kernel", "triton", "fp8-ds")
ENVIRONMENT = ("FP8_DS_", "NCCL_", "PYTORCH_", "TORCH_", "CUDA_", "TRITON_")
ERROR_CHARS = 3000
TEXT_BYTES = 24_000_000
"""Of text for the losses: about 6 M tokens, of which 200 steps of 8192 read 1.6 M."""


def machine() -> dict[str, Any]:
    """Device, versions, and the variables that change what libraries do."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed" if name != "fp8-ds" else "checkout"
    return {
        "device": device_name(),
        "num_gpus": num_gpus(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "environment": {
            key: without_folders(value) for key, value in sorted(os.environ.items()) if key.startswith(ENVIRONMENT)
        },
    }


def launch_command(arm: Arm, model: Model, port: int) -> list[str]:
    """What precedes the worker's own arguments."""
    worker = str(HERE / "end_to_end_worker.py")
    if arm.uses_deepspeed:
        launcher = ["-m", "deepspeed.launcher.runner", *which_gpus(model.gpus), "--master_port", str(port)]
    elif model.gpus > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={model.gpus}", f"--master_port={port}"]
    else:
        launcher = []
    return [sys.executable, *launcher, worker]


def run_arm(spec: dict[str, Any], arm: Arm, model: Model, limit: float, log: Path | None) -> dict[str, Any]:
    """The worker's result, or "error": that it is not installed, ran too long, or the end of its output.

    Args:
        limit: seconds after which all its processes are ended.
        log: to which all output is appended.
    """
    port = free_port()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        spec_path, out, output = (Path(folder, name) for name in ("spec.json", "out.json", "output"))
        spec_path.write_text(json.dumps(spec))
        command = [*launch_command(arm, model, port), "--spec", str(spec_path), "--out", str(out)]
        with output.open("w") as file:
            code = _run(command, file, limit, arm.env)
        text = output.read_text(errors="replace")
        result = json.loads(out.read_text()) if out.exists() else {"error": _error(code, text, limit)}
    for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        leftover.unlink(missing_ok=True)
    if log is not None:
        with log.open("a") as file:
            file.write(f"===== {arm.name}: exit status {code}\n{text}\n")
    return {**result, "wall_s": round(time.monotonic() - began, 1)}


def _run(command: list[str], output: Any, limit: float, variables: Mapping[str, str]) -> int:
    """Exit status of the command; `ENDED` if it and its children had to be ended.

    Args:
        variables: of its environment, instead of or beside those of this process.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if not uses_cuda():
        env["DS_ACCELERATOR"] = "cpu"
    return run_or_end(command, limit, stdout=output, stderr=subprocess.STDOUT, env={**env, **variables})


def _error(code: int, output: str, limit: float) -> str:
    """First line: the reason; then the end of the output."""
    lines = output.splitlines()
    for line in lines:
        if "NOT INSTALLED:" in line:
            return line[line.index("NOT INSTALLED:") :]
    told = [line for line in lines if re.search(r"(Error|Exception|Exit)\b.*: ", line) and "launch.py" not in line]
    reason = f"no end after {limit:.0f} s" if code == ENDED else f"exit status {code}"
    return without_folders(f"{reason}: {told[-1] if told else 'no error in its output'}\n{output[-ERROR_CHARS:]}")


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
        print(end_to_end_report.line(result), flush=True)
        save(results, skipped)
    save(results, skipped)
    return results, skipped


def make_spec(
    args: argparse.Namespace, piece: Piece, arm: Arm, model: Model, text: dict[str, Any] | None
) -> dict[str, Any]:
    """All that a worker needs to know."""
    timing = Timing(args.warm_up, args.blocks, args.steps)
    arm = with_chunks(arm, args.chunk_mem_const)
    return {
        "arm": arm.as_dict(),
        "model": vars(sized(model, arm)),
        "on_cuda": uses_cuda(),
        "ds_config": ds_config(arm, model, args.clip, not uses_cuda()) if arm.uses_deepspeed else None,
        "mode": piece.mode,
        "cross_entropy": piece.cross_entropy or args.cross_entropy,
        "chunk_mem_const": args.chunk_mem_const,
        "attention": args.attention,
        "clip": args.clip,
        "warm_up": timing.warm_up,
        "blocks": timing.blocks,
        "steps": args.loss_steps if piece.mode == "losses" else timing.steps,
        "profile_steps": 3,
        "traces": _trace_folder(args, arm),
        "text": text,
    }


def with_chunks(arm: Arm, chunk_mem_const: int) -> Arm:
    """The arm, with the constant in its fp8 block if Liger's loss is named there; else the model hands it to Liger."""
    activations = (arm.fp8 or {}).get("activations", {})
    if chunk_mem_const == 1 or activations.get("cross_entropy") != "liger":
        return arm
    activations = {**activations, "cross_entropy_chunk_mem_const": chunk_mem_const}
    return replace(arm, fp8={**arm.fp8, "activations": activations})


def _trace_folder(args: argparse.Namespace, arm: Arm) -> str | None:
    """Of an arm's traces; it exists then."""
    if args.traces is None:
        return None
    folder = args.traces.resolve() / re.sub(r"[^\w.=-]", "_", arm.name)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def prepare_text(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Tokens of this machine's text in a folder; what the result says about them."""
    from parity.data import prepare

    needed = args.loss_steps * model.micro_batch * model.gpus * model.seq
    is_tiny = model.vocab < 32000
    kind, size = ("bytes", 256) if is_tiny else ("bpe", model.vocab)
    text, cache = prepare(args.cache / f"{kind}-{size}", kind, size, needed, 400_000 if is_tiny else TEXT_BYTES)
    return {"cache": str(cache), "about": text.describe()}


def chosen_piece(args: argparse.Namespace) -> tuple[str, Piece]:
    """(name, what to measure)."""
    if args.piece:
        return args.piece, PIECES[args.piece]
    for mode, arms in (("profile", args.profile), ("losses", args.losses), ("speed", args.arms)):
        if arms:
            reference = args.reference if mode == "speed" else None
            names = [name for part in arms for name in part.split(",") if name != reference]
            return mode, Piece(args.model, reference, tuple(names), mode)
    raise AssertionError("argparse wants one of them")


def chosen_model(args: argparse.Namespace, piece: Piece) -> Model:
    """The piece's model with what the command line changes."""
    changes = {key: getattr(args, key) for key in ("layers", "seq", "micro_batch", "stage", "gpus")}
    return replace(MODELS[piece.model], **{key: value for key, value in changes.items() if value is not None})


def measure(args: argparse.Namespace) -> Path:
    """Runs a piece; returns the JSON to which it was appended."""
    name, piece = chosen_piece(args)
    if args.chunk_mem_const != 1 and (piece.cross_entropy or args.cross_entropy) != "liger":
        raise SystemExit(
            f"--chunk-mem-const: expected 1 with cross entropy stock, got {args.chunk_mem_const}. Add --cross-entropy "
            "liger, or take a piece that has it."
        )
    model, timing = chosen_model(args, piece), Timing(args.warm_up, args.blocks, args.steps)
    began = time.monotonic()
    for arm_name in filter(None, (piece.reference, *piece.arms)):
        parse_arm(arm_name, model)
    text = prepare_text(args, model) if piece.mode == "losses" else None
    stem = dated_stem(args.out, "end-to-end")
    path = stem.with_suffix(".json")
    earlier = end_to_end_report.load(path)
    run: dict[str, Any] = {
        "id": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "piece": name,
        "mode": piece.mode,
        "model": {"name": piece.model, **vars(model)},
        "reference": piece.reference,
        "cross_entropy": piece.cross_entropy or args.cross_entropy,
        "chunk_mem_const": args.chunk_mem_const,
        "attention": args.attention,
        "clip": args.clip,
        "timing": str(timing),
        "zero_optimization": ds_config(Arm("", "stock", False), model, args.clip, False)["zero_optimization"],
        "text": text and text["about"],
        "command": command_line(),
        "machine": machine(),
    }

    def one(arm_name: str, left: float) -> dict[str, Any]:
        arm = parse_arm(arm_name, model)
        spec = make_spec(args, piece, arm, model, text)
        return run_arm(spec, arm, model, min(args.arm_timeout, max(left, 30)), args.log)

    def save(results: list[dict[str, Any]], skipped: list[str]) -> None:
        end_to_end_report.add(path, {**run, "results": results, "skipped": skipped})

    num_steps = args.loss_steps if piece.mode == "losses" else timing.num_steps

    def predict(arm_name: str, known: Mapping[tuple[str, str], float]) -> float:
        return predicted_seconds(parse_arm(arm_name, model), model, piece.mode, num_steps, known)

    known = end_to_end_report.known_seconds(earlier, run["model"], run["timing"])
    run_piece(piece, args.budget - (time.monotonic() - began), one, predict, known, save=save)
    return path


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog=f"Arms: {GRAMMAR}.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--piece", choices=list(PIECES))
    what.add_argument("--arms", nargs="+", help="separated by spaces or commas")
    what.add_argument("--losses", nargs="+", metavar="ARM", help="losses over --loss-steps steps on text")
    what.add_argument("--profile", nargs="+", metavar="ARM", help="where these arms spend their time")
    what.add_argument("--report", nargs="*", type=Path, metavar="JSON", help="measure nothing; add these files' runs")
    how = parser.add_argument_group("how")
    how.add_argument("--model", choices=list(MODELS), default="llama-2b", help="a piece has its own")
    how.add_argument("--reference", metavar="ARM", help="is measured before and after --arms")
    how.add_argument(
        "--cross-entropy", choices=["stock", "liger"], default="stock", help="of all arms; some pieces have their own"
    )
    how.add_argument(
        "--chunk-mem-const",
        type=int,
        default=1,
        metavar="N",
        help="logits of Liger's loss may be N times as large as its input, in all arms: an arm with +liger has it by "
        "our key, others by Liger's argument",
    )
    how.add_argument(
        "--attention", choices=["causal", "sdpa", "cudnn"], default="causal", help="of all arms: end_to_end_trainers.py"
    )
    how.add_argument("--clip", type=float, default=1.0, help="norm of the gradients, 0: not clipped")
    how.add_argument("--blocks", type=int, default=3, help="that are timed")
    how.add_argument("--steps", type=int, default=10, help="of a block")
    how.add_argument("--warm-up", type=int, default=10)
    how.add_argument("--loss-steps", type=int, default=200)
    for name in ("layers", "seq", "micro-batch", "stage", "gpus"):
        how.add_argument(f"--{name}", type=int, help="instead of the model's")
    how.add_argument("--budget", type=float, default=570, help="seconds for the whole command")
    how.add_argument("--arm-timeout", type=float, default=240)
    how.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "end_to_end_text"))
    how.add_argument("--out", type=Path, default=HERE / "results")
    how.add_argument("--traces", type=Path, help="folder in which profiles leave rank 0's traces, in Chrome's format")
    how.add_argument("--log", type=Path, help="append all output of all arms to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.report is not None:
        path = end_to_end_report.merged(args.out, args.report)
    else:
        path = measure(args)
    print(end_to_end_report.publish(path))


if __name__ == "__main__":
    main()
