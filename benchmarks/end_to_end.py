"""Training runs: ours beside stock DeepSpeed, plain torch and torchao. One run gives speed, memory and loss.

    python benchmarks/end_to_end.py --model llama-2b --reference stock-eager --arms headline torchao
    python benchmarks/end_to_end.py --model llama-124m --reference stock-compiled --arms headline delayed-fp32 \\
        --seeds 60 --steps 6144 --trunk-steps 1536 --evaluations 12 --text-bytes 0 --budget 1500        # parity: a pair
    python benchmarks/end_to_end.py --model llama-2b --arms stock-eager headline --profile
    python benchmarks/end_to_end.py --report FETCHED.json ...            # adds runs from elsewhere; table and picture
    python benchmarks/end_to_end.py --model tiny-llama --reference stock-eager --arms ours-e4m11-eager --steps 20

An arm is a configuration (end_to_end_arms.py). Every run is a process of its own and trains on the same windows of text
as the other arms of its seed; DeepSpeed's arms differ in the "fp8" block only, or in what their names say. Gradients
are clipped at norm 1; the learning rate rises to 3e-4 and falls to zero. A step's time is the median of blocks of 10
steps, from the third block on; of a run that ends in bf16 the mean over its steps. The reference runs first, and, with
one seed and no trunk, once more at the end from other initial weights: the spread of these two bf16 runs is what the
loss column is judged by. An arm that is off by more than three times that is marked.

`--trunk-steps N`: a bf16 run takes N steps first, and all arms start from its weights. From scratch two runs part by
tenths of a per cent, whatever differs between them, where the model learns to copy from its context.

`--base FILE`: the reference is not trained again; the losses are compared with those of its runs in that file, which
must have the same text, seeds, model and steps. Their speed is not: machines differ. With `--trunk-steps` the arms then
begin from another trunk than that reference, whose held-out loss was 0.03 to 0.34 % away: train it again for a verdict.

An arm that fails is recorded with the end of its log, one that no longer fits into `--budget` is left out with a line,
the rest goes on. With several GPUs, arms that need one each run side by side; with `--per-gpu N` so do N on each GPU,
for losses alone: small models leave a GPU idle while their host works. Each call appends a run to one dated JSON
and makes table and picture from it. What was predicted for a run stands in docs/speed.md and docs/parity.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import end_to_end_report
import torch
from end_to_end_arms import GRAMMAR, MODELS, Arm, Model, ds_config, parse_arm, sized
from processes import error_of, run_logged
from results_io import ROOT, command_line, dated_stem, device_name, without_folders
from training_text import prepare

from fp8_ds.host import free_port, num_gpus, uses_cuda, which_gpus

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "deepspeed", "transformers", "torchao", "liger-kernel", "triton", "fp8-ds")
ENVIRONMENT = ("FP8_DS_", "NCCL_", "PYTORCH_", "TORCH_", "CUDA_", "TRITON_")
TRUNK = "stock-compiled"


def machine(more: Iterable[str] = ()) -> dict[str, Any]:
    """Device, versions of PACKAGES and `more`, and the variables that change what libraries do."""
    versions = {}
    for name in (*PACKAGES, *more):
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


@dataclass(frozen=True)
class Job:
    """One run of the list.

    Attributes:
        seed: decides the order of the text, initial weights and rounding.
        is_second: the reference once more, from other initial weights.
        is_trunk: trains the weights that the other runs of its seed start from.
    """

    arm: Arm
    seed: int
    is_second: bool = False
    is_trunk: bool = False


def work_list(args: argparse.Namespace, model: Model) -> list[Job]:
    """By seed: the trunk, the reference, the arms, the reference again."""
    jobs = []
    reference = [parse_arm(args.reference, model)] if args.reference and not args.base else []
    arms = [parse_arm(name, model) for name in args.arms if name != args.reference]
    for seed in args.seeds:
        jobs += [Job(parse_arm(TRUNK, model), seed, is_trunk=True)] if args.trunk_steps else []
        jobs += [Job(arm, seed) for arm in (*reference, *arms)]
    if reference and arms and len(args.seeds) == 1 and not args.trunk_steps and not args.profile:
        jobs.append(Job(reference[0], args.seeds[0], is_second=True))
    return jobs


def make_spec(args: argparse.Namespace, job: Job, model: Model, cache: Path) -> dict[str, Any]:
    """All that a worker needs to know."""
    arm = with_run(with_chunks(job.arm, args.chunk_mem_const), job.seed, args.steps)
    trunk = args.cache / f"trunk-{model.kind}-{model.hidden}-s{job.seed}.pt" if args.trunk_steps else None
    return {
        "arm": arm.as_dict(),
        "model": vars(sized(model, arm)),
        "on_cuda": uses_cuda(),
        "ds_config": ds_config(arm, model, args.clip, not uses_cuda()) if arm.uses_deepspeed else None,
        "seed": job.seed,
        "init_seed": job.seed + job.is_second,
        "steps": args.trunk_steps if job.is_trunk else args.steps,
        "first_step": 0 if job.is_trunk else args.trunk_steps,
        "decays": not job.is_trunk,
        "weights": None if job.is_trunk or trunk is None else str(trunk),
        "save_weights": str(trunk) if job.is_trunk else None,
        "evaluations": args.evaluations,
        "held_out_tokens": args.held_out_tokens,
        "cross_entropy": args.cross_entropy,
        "chunk_mem_const": args.chunk_mem_const,
        "attention": args.attention,
        "clip": args.clip,
        "profile": args.profile,
        "traces": _trace_folder(args, arm),
        "text": {"cache": str(cache)},
    }


def with_chunks(arm: Arm, chunk_mem_const: int) -> Arm:
    """The arm, with the constant in its fp8 block if Liger's loss is named there; else the model hands it to Liger."""
    activations = (arm.fp8 or {}).get("activations", {})
    if chunk_mem_const == 1 or "cross_entropy_chunk_mem_const" not in activations:
        return arm
    activations = {**activations, "cross_entropy_chunk_mem_const": chunk_mem_const}
    return replace(arm, fp8={**arm.fp8, "activations": activations})


def with_run(arm: Arm, seed: int, steps: int) -> Arm:
    """The arm, with what of its block depends on the run: what FP8 states round by, and the length for a schedule."""
    if arm.fp8 is None:
        return arm
    fp8 = dict(arm.fp8)
    if arm.has_fp8_states:
        fp8["optimizer"] = {**fp8.get("optimizer", {}), "seed": seed}
    if fp8.get("schedule", {}).get("bf16_last_fraction"):
        fp8["schedule"] = {"total_steps": steps, **fp8["schedule"]}
    return replace(arm, fp8=fp8)


def _trace_folder(args: argparse.Namespace, arm: Arm) -> str | None:
    """Of an arm's traces; it exists then."""
    if args.traces is None:
        return None
    folder = args.traces.resolve() / re.sub(r"[^\w.=-]", "_", arm.name)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


# --- processes ---


def launch_command(arm: Arm, model: Model, port: int) -> list[str]:
    """What precedes the worker's own arguments; on one GPU nothing but Python."""
    worker = str(HERE / "end_to_end_worker.py")
    if model.gpus == 1:
        launcher = []
    elif arm.uses_deepspeed:
        launcher = ["-m", "deepspeed.launcher.runner", *which_gpus(model.gpus), "--master_port", str(port)]
    else:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={model.gpus}", f"--master_port={port}"]
    return [sys.executable, *launcher, worker]


def run_arm(spec: dict[str, Any], arm: Arm, model: Model, slot: int, limit: float, log: Path | None) -> dict[str, Any]:
    """The worker's result, or "error": that it is not installed, ran too long, or the end of its output.

    Args:
        slot: which of this machine's groups of `model.gpus` GPUs.
        limit: seconds after which all its processes are ended.
        log: to which all output is appended.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        spec_path, out = Path(folder, "spec.json"), Path(folder, "out.json")
        spec_path.write_text(json.dumps(spec))
        command = [*launch_command(arm, model, port), "--spec", str(spec_path), "--out", str(out)]
        env = environment(arm, model, port, slot)
        code, text, seconds = run_logged(arm.name, command, limit, log, env=env)
        result = json.loads(out.read_text()) if out.exists() else {"error": error_of(code, text, limit)}
    for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        leftover.unlink(missing_ok=True)
    return {**result, "wall_s": seconds}


def environment(arm: Arm, model: Model, port: int, slot: int) -> dict[str, str]:
    """Of the command: where our code is, which device, and for one GPU what a launcher would set."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if not uses_cuda():
        env["DS_ACCELERATOR"] = "cpu"
    if model.gpus == 1:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if uses_cuda():
            visible = env.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else [str(k) for k in range(num_gpus())]
            env["CUDA_VISIBLE_DEVICES"] = devices[slot]
    return {**env, **arm.env}


class Scheduler:
    """Takes the jobs in their order, one on each group of GPUs; those of a seed wait for its trunk.

    Args:
        budget: seconds; a job starts only if the longest run so far would still fit.
        run: (job, group of GPUs, seconds left) to a result with `wall_s`.
        save: called after every job with all results, in the jobs' order, and lines about what was left out.
    """

    def __init__(
        self,
        jobs: list[Job],
        num_groups: int,
        budget: float,
        run: Callable[[Job, int, float], dict[str, Any]],
        save: Callable[[list[dict[str, Any]], list[str]], None] = lambda results, skipped: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs, self.groups, self.run_job, self.save, self.clock = jobs, range(num_groups), run, save, clock
        self.end = clock() + budget
        self.results: dict[int, dict[str, Any]] = {}
        self.skipped: list[str] = []
        self.waiting = queue.SimpleQueue[int]()
        for number in range(len(jobs)):
            self.waiting.put(number)
        self.trunks = {job.seed: threading.Event() for job in jobs if job.is_trunk}
        self.lock = threading.Lock()

    def run(self) -> tuple[list[dict[str, Any]], list[str]]:
        threads = [threading.Thread(target=self._serve, args=(group,)) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.save(self._in_order(), self.skipped)
        return self._in_order(), self.skipped

    def _in_order(self) -> list[dict[str, Any]]:
        return [self.results[number] for number in sorted(self.results)]

    def _serve(self, group: int) -> None:
        while True:
            try:
                number = self.waiting.get_nowait()
            except queue.Empty:
                return
            job = self.jobs[number]
            if not job.is_trunk and job.seed in self.trunks:
                self.trunks[job.seed].wait()
            left, needed = self.end - self.clock(), self._longest(job)
            if needed > left:
                line = f"{job.arm.name}, seed {job.seed}: left out, it takes {needed:.0f} s, {left:.0f} are left"
                print(line, flush=True)
                with self.lock:
                    self.skipped.append(line)
                continue
            about = {"arm": job.arm.name, "seed": job.seed, "is_second": job.is_second, "is_trunk": job.is_trunk}
            result = {**about, **self.run_job(job, group, left)}
            print(end_to_end_report.line(result), flush=True)
            with self.lock:
                self.results[number] = result
                self.save(self._in_order(), self.skipped)
            if job.is_trunk:
                self.trunks[job.seed].set()

    def _longest(self, job: Job) -> float:
        alike = [r["wall_s"] for r in self.results.values() if "error" not in r and r["is_trunk"] == job.is_trunk]
        return max(alike, default=0.0)


# --- the command ---


def prepare_text(args: argparse.Namespace, model: Model) -> tuple[str, Path]:
    """(what the text is, the folder of its tokens)"""
    steps = args.steps + args.trunk_steps
    epochs = 1 if args.text_bytes else 2
    needed = steps * model.micro_batch * model.gpus * model.seq // epochs
    is_tiny = model.vocab < 32000
    kind, size = ("bytes", 256) if is_tiny else ("bpe", model.vocab)
    most = 400_000 if is_tiny else args.text_bytes or None
    text, cache = prepare(args.cache / f"{kind}-{size}-{most or 'all'}", kind, size, needed, most)
    return text.describe(), cache


def chosen_model(args: argparse.Namespace) -> Model:
    """The model with what the command line changes."""
    changes = {key: getattr(args, key) for key in ("layers", "seq", "micro_batch", "stage", "gpus")}
    return replace(MODELS[args.model], **{key: value for key, value in changes.items() if value is not None})


def measure(args: argparse.Namespace) -> Path:
    """Runs the list; returns the JSON to which it was appended."""
    if args.base and not args.reference:
        raise SystemExit("--base: expected the arm whose runs it has as --reference, got none. Name it.")
    if args.chunk_mem_const != 1 and args.cross_entropy != "liger":
        raise SystemExit(
            f"--chunk-mem-const: expected 1 with cross entropy stock, got {args.chunk_mem_const}. Add --cross-entropy "
            "liger."
        )
    began, model = time.monotonic(), chosen_model(args)
    jobs = work_list(args, model)
    about, cache = prepare_text(args, model)
    path = dated_stem(args.out, end_to_end_report.NAME).with_suffix(".json")
    run: dict[str, Any] = {
        "id": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "mode": "profile" if args.profile else "train",
        "model": {"name": args.model, **vars(model)},
        "reference": args.reference,
        "steps": args.steps,
        "trunk_steps": args.trunk_steps,
        "cross_entropy": args.cross_entropy,
        "chunk_mem_const": args.chunk_mem_const,
        "attention": args.attention,
        "clip": args.clip,
        "per_gpu": args.per_gpu,
        "zero_optimization": ds_config(Arm("", "stock", False), model, args.clip, False)["zero_optimization"],
        "text": about,
        "command": command_line(),
        "machine": machine(),
    }
    print(f"text: {about}, {time.monotonic() - began:.0f} s", flush=True)

    def one(job: Job, group: int, left: float) -> dict[str, Any]:
        spec = make_spec(args, job, model, cache)
        slot = group % num_slots
        return run_arm(spec, job.arm, model, slot, min(args.arm_timeout, max(left, 30)), args.log)

    def save(results: list[dict[str, Any]], skipped: list[str]) -> None:
        end_to_end_report.add(path, {**run, "results": results, "skipped": skipped})

    if args.base:
        run["base"] = end_to_end_report.base_runs(run, end_to_end_report.load(args.base), args.seeds)
    num_slots = max(1, num_gpus() // model.gpus) if uses_cuda() else 1
    num_groups = min(args.groups or 99, num_slots * args.per_gpu)
    Scheduler(jobs, num_groups, args.budget - (time.monotonic() - began), one, save).run()
    return path


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog=f"Arms: {GRAMMAR}.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arms", nargs="+")
    what.add_argument("--report", nargs="*", type=Path, metavar="JSON", help="measure nothing; add these files' runs")
    how = parser.add_argument_group("how")
    how.add_argument("--model", choices=list(MODELS), default="llama-2b")
    how.add_argument("--reference", metavar="ARM", help="bf16, with which the others' speed and loss are compared")
    how.add_argument("--base", type=Path, metavar="JSON", help="file with the reference's runs of these seeds")
    how.add_argument("--seeds", nargs="+", type=int, default=[0])
    how.add_argument("--steps", type=int, default=200)
    how.add_argument("--trunk-steps", type=int, default=0, help="in bf16, from whose weights all arms start")
    how.add_argument("--evaluations", type=int, default=1, help="of the held-out loss, the last after the last step")
    how.add_argument("--held-out-tokens", type=int, default=131_072, help="that an evaluation reads")
    how.add_argument("--profile", action="store_true", help="where the arms spend their time and memory, no losses")
    how.add_argument("--traces", type=Path, help="folder in which profiles leave rank 0's traces, in Chrome's format")
    how.add_argument("--cross-entropy", choices=["stock", "liger"], default="stock", help="of all arms")
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
    for name in ("layers", "seq", "micro-batch", "stage", "gpus"):
        how.add_argument(f"--{name}", type=int, help="instead of the model's")
    how.add_argument("--groups", type=int, help="that train side by side; else as many as GPUs allow")
    how.add_argument(
        "--per-gpu", type=int, default=1, metavar="N", help="runs that share a GPU; their speed is not told"
    )
    how.add_argument("--budget", type=float, default=570, help="seconds for the whole command")
    how.add_argument("--arm-timeout", type=float, default=1500)
    how.add_argument("--text-bytes", type=int, default=24_000_000, help="of text that is read; 0: all, twice at most")
    how.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "end_to_end_text"))
    how.add_argument("--out", type=Path, default=HERE / "results")
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
