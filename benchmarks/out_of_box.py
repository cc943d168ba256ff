"""What `"fp8": {"enabled": true}` gives a script of transformers and DeepSpeed as it is: 36 rows beside bf16's.

    python benchmarks/out_of_box.py --budget 540 --out $OUT
    python benchmarks/out_of_box.py --budget 540 --resume FETCHED.json --out $OUT        # what that file lacks
    python benchmarks/out_of_box.py --budget 0 --resume FETCHED.json                     # its table alone

A row is a model of transformers' own class, a width, a ZeRO stage, eager or compiled, all layers' activations kept or
checkpointed, and a setting; together they contain every pair of these. The script is `train` of out_of_box_run.py:
nothing of ours is in it but the import and the "fp8" block. Each row needs three runs: DeepSpeed's bf16 in eager, to
which ratios are, ours, and DeepSpeed's compiled bf16. Rows share what is the same, and compiled runs beside eager rows
come last. A run is a process of its own, and trains on the same text from the same weights as those of its row.

The learning rate's scheduler says that training takes 100 steps, of which the last three are in bf16. Ours takes 16
more, which are in bf16, too, and change nothing (their rate is zero): a step's time is 97 % of one in FP8 and 3 % of
one in bf16, medians of blocks of four steps. The loss is the mean of steps 81 to 100. Most of a run is compiling, so
each GPU has several at once, but whoever times a block has the GPU for itself: the others stop before their next block.
Runs that failed are tried again when nothing else is left.

A second table has the key's rows of width 4096 in a script that makes the same scheduler itself, so that nothing knows
of 100 steps: the first and last layer are in bf16 then. A third has runs of ours that `--runs` has named beside these,
such as "llama 2048 2 compiled kept enabled>=6e10", whose `linear.min_size` is 6e10 (1e13: all linears in bf16). Without
a GPU: tiny models, compiled by aot_eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Condition
from typing import Any, NamedTuple

import torch
from end_to_end import machine
from processes import ENDED, error_of, run_or_end
from results_io import ROOT, dated_stem, heading
from training_text import prepare

from fp8_ds.host import free_port, uses_cuda

VOCAB = 32000
STEPS, AFTER = 100, 16
"""Steps that the scheduler knows of, and those of ours after them."""
STEPS_COMPILED_BF16 = 60
"""Of which no loss is wanted."""
LAST_SHARE = 0.03
"""Of the steps that `{"enabled": true}` takes in bf16, where their number is known."""
HERE = Path(__file__).resolve().parent
LIMIT = 400.0
"""Seconds after which a run has failed."""


class Sizes(NamedTuple):
    """What goes with a width; 8,192 tokens a step. `gib`: more than any run of it takes on a GPU. `lr`: at the end of
    its warm-up; at 3e-4 the loss of two layers of width 8192 rises again, and chance decides where it ends."""

    layers: int
    ffn: int
    head_dim: int
    seq: int
    micro_batch: int
    gib: int
    lr: float = 3e-4


WIDTHS = {
    768: Sizes(8, 2048, 64, 1024, 8, 10),
    1024: Sizes(8, 2816, 64, 1024, 8, 12),
    2048: Sizes(6, 5632, 128, 2048, 4, 18),
    4096: Sizes(6, 14336, 128, 4096, 2, 50),
    8192: Sizes(2, 28672, 128, 4096, 2, 50, 1e-4),
}
TINY = 64, Sizes(2, 128, 16, 32, 2, 1)
SETTINGS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "enabled": {"enabled": True},
    "fast": {"enabled": True, "preset": "fast"},
    "fallback": {"enabled": True},
}
"""The "fp8" block. With "fallback" the script makes its own scheduler."""


class Run(NamedTuple):
    """One training; a row is that of ours in it. `setting` is one of `SETTINGS`, with `>=SIZE` behind it one in which
    `linear.min_size` is SIZE."""

    model: str
    width: int
    stage: int
    mode: str
    activations: str
    setting: str

    @classmethod
    def of(cls, name: str) -> Run:
        model, width, stage, *rest = name.split()
        return cls(model, int(width), int(stage), *rest)

    @property
    def name(self) -> str:
        return " ".join(map(str, self))

    @property
    def block(self) -> dict[str, Any] | None:
        setting, _, size = self.setting.partition(">=")
        block = SETTINGS[setting]
        return block if block is None or not size else {**block, "linear": {"min_size": round(float(size))}}

    @property
    def is_ours(self) -> bool:
        return self.setting != "bf16"

    @property
    def references(self) -> tuple[Run, Run]:
        """DeepSpeed's bf16 of the same model and memory, in eager and compiled."""
        eager, compiled = (self._replace(mode=mode, setting="bf16") for mode in ("eager", "compiled"))
        return eager, compiled

    @property
    def target(self) -> float:
        """Times DeepSpeed's eager bf16 that the row is to reach."""
        if self.width != 4096 or self.setting == "fallback":
            return 1.0
        if self.activations == "checkpointed":
            return 1.3
        if self.setting == "fast":
            return 2.2 if self.mode == "compiled" else 1.0
        targets = {2: {"eager": 1.4, "compiled": 1.7}, 3: {"eager": 1.25, "compiled": 1.5}}
        return targets[self.stage][self.mode]


ROWS = tuple(
    map(
        Run.of,
        """
llama    4096 2 compiled kept         enabled
llama    4096 2 compiled kept         fast
qwen2    4096 2 eager    kept         enabled
mistral  2048 2 eager    kept         enabled
qwen2     768 3 compiled kept         enabled
mistral  4096 3 compiled kept         enabled
mistral   768 3 eager    checkpointed fast
gemma2   1024 2 compiled checkpointed enabled
phi3     4096 3 eager    kept         enabled
gpt2     2048 3 compiled checkpointed fast
gpt2     4096 2 eager    checkpointed enabled
llama    8192 3 eager    checkpointed fast
gpt_neox 4096 2 compiled checkpointed enabled
mixtral   768 2 eager    kept         enabled
mixtral  4096 3 eager    checkpointed fast
gpt_neox 1024 3 compiled kept         fast
gemma2   4096 3 compiled kept         fast
qwen2    8192 2 compiled checkpointed enabled
phi3     2048 2 compiled kept         fast
qwen2    1024 3 eager    checkpointed fast
phi3      768 3 compiled checkpointed fast
gemma2    768 2 eager    kept         enabled
mistral  8192 3 compiled kept         fast
gpt_neox  768 2 eager    checkpointed fast
gpt2     1024 3 eager    kept         enabled
mixtral  2048 3 compiled checkpointed enabled
llama    2048 2 eager    checkpointed enabled
mixtral  1024 2 compiled kept         fast
gemma2   2048 3 eager    checkpointed fast
phi3     1024 2 eager    checkpointed enabled
gpt2      768 2 compiled kept         fast
llama    1024 3 eager    kept         fast
mistral  1024 2 compiled checkpointed fast
gpt_neox 2048 3 eager    kept         enabled
llama     768 3 compiled checkpointed enabled
qwen2    2048 2 compiled kept         fast
""".strip().splitlines(),
    )
)
"""In the order of measurement: each next one has many pairs that were not measured yet."""
FALLBACK_ROWS = tuple(row._replace(setting="fallback") for row in ROWS if (row.width, row.setting) == (4096, "enabled"))


# --- what a run is told ---


def model_config(model: str, width: int, sizes: Sizes, vocab: int) -> dict[str, Any]:
    """Arguments of transformers' configuration; all else is as the class has it."""
    heads = width // sizes.head_dim
    config = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "max_position_embeddings": sizes.seq,
        "use_cache": False,
    }
    if model == "gpt2":  # dropout would hide what FP8 does to the loss
        return config | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if model == "gpt_neox":
        return config | {"intermediate_size": 4 * width}
    config |= {"intermediate_size": sizes.ffn, "num_key_value_heads": heads // 4}
    if model == "gemma2":
        config |= {"head_dim": 2 * sizes.head_dim, "num_attention_heads": heads // 2}
    elif model == "phi3":
        config |= {"pad_token_id": 0}  # its own is none of this vocabulary
    elif model == "mixtral":  # eight experts, of which a token goes to two
        config |= {"intermediate_size": sizes.ffn // 2, "num_hidden_layers": sizes.layers // 2}
    return config


def ds_config(run: Run, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's configuration, its defaults where a user need not write anything."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": sizes.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0.0,
                "warmup_max_lr": sizes.lr,
                "warmup_num_steps": 10,
                "warmup_type": "linear",
                "total_num_steps": STEPS,
            },
        },
        "zero_optimization": {"stage": run.stage},
        "steps_per_print": 1_000_000,
    }
    if (block := run.block) is not None:
        config["fp8"] = block
    return config


def make_spec(run: Run, text: Path) -> dict[str, Any]:
    """All that a run's process needs to know."""
    on_cuda = uses_cuda()
    width, sizes = (run.width, WIDTHS[run.width]) if on_cuda else TINY
    config = ds_config(run, sizes)
    if not on_cuda:
        config["optimizer"]["params"]["torch_adam"] = True
    compiled_bf16 = run.mode == "compiled" and not run.is_ours
    ends_in_bf16 = run.is_ours and run.setting != "fallback"
    return {
        "model_type": run.model,
        "model": model_config(run.model, width, sizes, VOCAB if on_cuda else 256),
        "ds_config": config,
        "makes_scheduler": run.setting == "fallback",
        "is_checkpointed": run.activations == "checkpointed",
        "compile": None if run.mode == "eager" else {} if on_cuda else {"backend": "aot_eager"},
        "device": "cuda" if on_cuda else "cpu",
        "text": str(text),
        "seq": sizes.seq,
        "num_steps": STEPS_COMPILED_BF16 if compiled_bf16 else STEPS + AFTER * ends_in_bf16,
        "num_warm": 20 if compiled_bf16 else 40,
    }


# --- all runs ---


def environment(gpu: int) -> dict[str, str]:
    """Return the environment of the one rank of a run, as a launcher would make it, on one GPU of those named here."""
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    env |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])}
    if not uses_cuda():
        return env | {"DS_ACCELERATOR": "cpu"}
    named = env.get("CUDA_VISIBLE_DEVICES")
    return env | {"CUDA_VISIBLE_DEVICES": named.split(",")[gpu] if named else str(gpu)}


def run_one(spec: Mapping[str, Any], stem: Path, gpu: int, limit: float) -> tuple[int, dict[str, Any], str]:
    """A run in a process of its own, on one GPU: its exit status, its result, or "error", with "wall_s", and output."""
    spec_path, out, output = (stem.with_suffix(f".{kind}") for kind in ("spec", "out", "log"))
    spec_path.write_text(json.dumps(spec))
    command = [sys.executable, str(HERE / "out_of_box_run.py"), "--spec", str(spec_path), "--out", str(out)]
    began = time.monotonic()
    with output.open("w") as file:
        code = run_or_end(command, limit, grace=2, stdout=file, stderr=subprocess.STDOUT, env=environment(gpu))
    printed = output.read_text(errors="replace")
    result = (
        json.loads(out.read_text()) if code == 0 else {"error": error_of(code, printed, limit).splitlines()[0][:300]}
    )
    return code, {**result, "wall_s": round(time.monotonic() - began, 1)}, printed


def wanted(rows: Sequence[Run]) -> list[Run]:
    """All runs of the rows, each once, in the order of measurement."""
    first = [
        run for row in rows for run in (row.references[0], row, row.references[1]) if run.mode in ("eager", row.mode)
    ]
    return list(dict.fromkeys([*first, *(row.references[1] for row in rows)]))


def measure(runs: Sequence[Run], state: dict[str, Any], path: Path, text: Path, args: argparse.Namespace) -> None:
    """Take the runs that are missing, several at once on each GPU, and write the state after each."""
    found = state["runs"]
    failed = [run for run in runs if "error" in found.get(run.name, {})]
    todo = [run for run in runs if run.name not in found] + failed
    guard, free = Condition(), [args.gib] * (torch.cuda.device_count() if uses_cuda() else 1)

    def seconds(run: Run) -> float:
        """What one like it took, waiting for its turns included."""
        alike = [found.get(known.name) for known in runs if (known.mode, known.is_ours) == (run.mode, run.is_ours)]
        return median([result["wall_s"] for result in alike if is_good(result)] or [0.0])

    def take_runs(gpu: int, folder: Path) -> None:
        while True:
            with guard:
                while True:
                    left = args.end - time.monotonic()
                    ready = [run for run in todo if seconds(run) < left]
                    if not ready:
                        return
                    if (run := next((r for r in ready if WIDTHS[r.width].gib <= free[gpu]), None)) is not None:
                        break
                    guard.wait(timeout=5.0)
                todo.remove(run)
                free[gpu] -= WIDTHS[run.width].gib
            spec = make_spec(run, text) | {"turns": str(folder / f"turns-{gpu}")}
            code, result, printed = run_one(spec, folder / run.name.replace(" ", "-"), gpu, min(left, LIMIT))
            with guard:
                free[gpu] += WIDTHS[run.width].gib
                guard.notify_all()
                if args.log is not None:
                    with args.log.open("a") as log:
                        log.write(f"===== {run.name}\n{printed}\n")
                if code == ENDED and left < LIMIT:
                    return  # it had no time
                found[run.name] = result
                write(path, state)
                print(f"{run.name}: {json.dumps(result)}", flush=True)

    gpus = [gpu for gpu in range(len(free)) for _ in range(args.at_once)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(take_runs, gpus, [Path(folder)] * len(gpus)))


def write(path: Path, state: Mapping[str, Any]) -> None:
    """The file as a whole or not at all, a line a run."""
    about = json.dumps({key: value for key, value in state.items() if key != "runs"})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in state["runs"].items())
    path.with_suffix(".part").write_text(f'{about[:-1]}, "runs": {{\n{lines}\n}}}}\n')
    os.replace(path.with_suffix(".part"), path)


# --- the table ---


def is_good(result: Mapping[str, Any] | None) -> bool:
    return result is not None and "error" not in result


def mean_ms(result: Mapping[str, Any]) -> float:
    """Of a step of a whole training, whose last part is in bf16 if that was seen."""
    in_bf16 = result["step_ms"] if result["bf16_ms"] is None else result["bf16_ms"]
    return float((1 - LAST_SHARE) * result["step_ms"] + LAST_SHARE * in_bf16)


def cells(row: Run, found: Mapping[str, Mapping[str, Any]]) -> tuple[float | None, list[str]]:
    """How many times as fast as DeepSpeed's eager bf16 the row is, None where that is not known; its cells."""
    eager, compiled, ours = (found.get(run.name) for run in (*row.references, row))
    mode = row.mode + (", checkpointing" if row.activations == "checkpointed" else "")
    about = [f"{row.model} {row.width}", str(row.stage), mode, row.setting]
    if wrong := [result["error"] for result in (eager, ours) if result is not None and "error" in result]:
        return None, [*about, f"**{wrong[0].replace('|', '/')}**"]
    if eager is None or ours is None:
        return None, [*about, "not measured"]
    ratio = eager["step_ms"] / mean_ms(ours)
    marked = f"{ratio:.2f}" if ratio >= row.target else f"**{ratio:.2f}**"
    beside = f"{eager['step_ms'] / compiled['step_ms']:.2f}" if compiled and is_good(compiled) else ""
    ms, gib = (", ".join(f"{ours[key]:.1f}" for key in keys if ours[key] is not None)
               for keys in (("step_ms", "bf16_ms"), ("gib", "bf16_gib")))  # fmt: skip
    loss = f"{100 * (ours['loss'] / eager['loss'] - 1):+.2f}"
    in_fp8 = ours["plan"].removeprefix("fp8: ").partition(",")[0]
    if num := ours.get("num_in_bf16"):
        in_fp8 += f", {num} of them stay bf16"
    shown = [f"{eager['step_ms']:.1f}", ms, f"{marked} ({row.target:g})", beside, f"{eager['gib']:.1f}; {gib}"]
    return ratio, [*about, *shown, loss, in_fp8]


def table(rows: Sequence[Run], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a line a row, and how many reach their target."""
    titles = ["model, width", "ZeRO", "mode", "setting", "ms of bf16 eager", "ours in FP8, in bf16", "x (target)"]
    titles += ["x of bf16 compiled", "GiB of bf16 eager; ours in FP8, in bf16", "loss, % of bf16's", "in FP8"]
    found_cells = [cells(row, found) for row in rows]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(texts)} |" + " |" * (len(titles) - len(texts)) for _, texts in found_cells]
    known = [(ratio, row.target) for row, (ratio, _) in zip(rows, found_cells, strict=True) if ratio is not None]
    fast, reached = sum(ratio >= 1 for ratio, _ in known), sum(ratio >= target for ratio, target in known)
    lines += ["", f"x: times as fast as DeepSpeed's eager bf16. {len(known)} of {len(rows)} rows are measured: {fast} "
              f"are at least as fast, {reached} reach their target, and the others' ratios are bold."]  # fmt: skip
    return "\n".join(lines) + "\n"


# --- the command ---


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="transformers and DeepSpeed out of the box, FP8 beside bf16.")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for the whole command")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="file of earlier pieces, of the same kind of GPU")
    parser.add_argument("--runs", nargs="+", type=Run.of, help="these alone, by name; of ours they may be in no row")
    parser.add_argument("--at-once", type=int, default=6, help="runs that may share a GPU")
    parser.add_argument("--gib", type=float, default=135.0, help="memory of a GPU that they have together")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "end_to_end_text"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--log", type=Path, help="append all output of all runs to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.end = time.monotonic() + args.budget
    path = dated_stem(args.out, "out-of-box").with_suffix(".json")
    state: dict[str, Any] = json.loads(args.resume.read_text()) if args.resume else {"runs": {}}
    if args.budget > 0:
        kind, size, most = ("bpe", VOCAB, 24_000_000) if uses_cuda() else ("bytes", 256, 400_000)
        text, cache = prepare(args.cache / f"{kind}-{size}-{most}", kind, size, 0, most)
        about = {"machine": machine(), "text": text.describe()}
        before = {key: state.get(key, value) for key, value in about.items()}
        if (before["machine"]["device"], before["text"]) != (about["machine"]["device"], about["text"]):
            raise SystemExit(f"--resume: expected runs of this GPU and text, {about}, got {before}. Leave it out.")
        state = about | state
        measure(args.runs or [*wanted(ROWS), *FALLBACK_ROWS], state, path, cache, args)
    write(path, state)
    named = [run for run in map(Run.of, state["runs"]) if run.is_ours and run not in (*ROWS, *FALLBACK_ROWS)]
    text_of_tables = heading(path.stem) + table(ROWS, state["runs"])
    text_of_tables += f"\n## Where nothing knows the number of steps\n\n{table(FALLBACK_ROWS, state['runs'])}"
    if named:
        text_of_tables += (
            "\n## Least sizes of a linear\n\nA run and its reference may be of two hosts: compare ms, not x.\n\n"
        )
        text_of_tables += table(named, state["runs"])
    path.with_suffix(".md").write_text(text_of_tables)
    print(text_of_tables)


if __name__ == "__main__":
    main()
