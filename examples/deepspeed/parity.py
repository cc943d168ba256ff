"""Is the loss of FP8 that of bf16? Trains pairs of runs that differ in the "fp8" block alone, and compares them.

    python examples/deepspeed/parity.py                                # a tiny model: a minute on a CPU
    deepspeed examples/deepspeed/parity.py --size 100m --steps 3000 --seq-len 1024 \
        --config configs/ds_zero2_fp8.json configs/ds_zero2_fp8_fast.json
    deepspeed examples/deepspeed/parity.py --model my_model --tokenizer my_model --text corpus/*.txt --config ds.json

Of each seed there is a run in bf16, by the first configuration without its "fp8" block, and one by each configuration:
all from the same weights, on the same text in the same order. A run's losses are in a file of --out; the same command
again takes the runs that are missing there. At the end `fp8-ds compare` judges the held-out losses after the last step.

`build_model`, `loss_of` and `read_text` are what to change for a model or a text of another kind.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from data import read_stdlib, sample_batch
from deepspeed.accelerator import get_accelerator
from model import SIZES, ByteLlama
from torch import Tensor, nn
from train import mean_over_ranks

import fp8_ds  # noqa: F401  (installs)
from fp8_ds.config import Fp8Config
from fp8_ds.host import free_port

ROOT = Path(__file__).parents[2]
HELD_OUT_ONE_IN = 20
"""Share of --text that is held out, its end, without --held-out."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", default=[ROOT / "configs/ds_zero2_fp8.json"])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the example's own model")
    parser.add_argument("--model", type=Path, help="folder of a causal language model of transformers, in its place")
    parser.add_argument("--pretrained", action="store_true", help="all runs start from the weights in --model")
    parser.add_argument("--text", type=Path, nargs="+", help="files; default: the sources of Python's library")
    parser.add_argument("--held-out", type=Path, nargs="+", help="files to evaluate on; default: the end of --text")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer of transformers; default: bytes")
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument(
        "--evaluations", type=int, default=6, help="evenly spread, one more comes before the first step"
    )
    parser.add_argument("--held-out-batches", type=int, default=8, help="micro-batches per rank of an evaluation")
    parser.add_argument("--compile", action="store_true", help="engine.compile() in all runs")
    parser.add_argument("--out", type=Path, default=Path("parity"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    if args.pretrained and args.model is None:
        parser.error("--pretrained needs --model FOLDER, whose weights the runs start from")
    return args


def build_model(args: argparse.Namespace) -> nn.Module:
    """The model with the weights of torch's seed; whole in the memory of each rank, rounded to bf16."""
    if args.model is None:
        return ByteLlama(SIZES[args.size]).to(torch.bfloat16)
    from transformers import AutoConfig, AutoModelForCausalLM

    if args.pretrained:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    model.config.use_cache = False
    return model.to(torch.bfloat16).train()


def loss_of(engine: Any, args: argparse.Namespace, tokens: Tensor) -> Tensor:
    """Mean loss of int64 tokens [batch, seq_len + 1]."""
    if args.model is None:
        return engine(tokens)
    inputs = tokens[:, :-1].contiguous()
    return engine(input_ids=inputs, labels=inputs).loss


def read_text(args: argparse.Namespace) -> dict[str, Tensor]:
    """Tokens to train and to evaluate on, integers [num_tokens]."""
    if args.text is None:
        return {"train": read_stdlib("train"), "held_out": read_stdlib("held_out")}
    train = encode(args.text, args.tokenizer)
    cut = len(train) - len(train) // HELD_OUT_ONE_IN
    if args.held_out is None:
        return {"train": train[:cut], "held_out": train[cut:]}
    return {"train": train, "held_out": encode(args.held_out, args.tokenizer)}


def encode(files: Sequence[Path], tokenizer: Path | None) -> Tensor:
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    if tokenizer is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(tokenizer).encode(text, add_special_tokens=False))


def arms_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """DeepSpeed configurations by the name of their file, "bf16" first."""
    configs = {path.stem: json.loads(path.read_text()) for path in args.config}
    for name, config in configs.items():
        if not config.get("fp8", {}).get("enabled"):
            raise SystemExit(f'--config: expected an enabled "fp8" block in each, got none in {name}. Add one.')
        if "scheduler" in config:  # the learning rate ends where training ends
            params = config["scheduler"]["params"]
            params["total_num_steps"] = args.steps
            params["warmup_num_steps"] = min(params.get("warmup_num_steps", args.steps), args.steps)
    first = next(iter(configs.values()))
    return {"bf16": {key: value for key, value in first.items() if key != "fp8"}, **configs}


def batch_of(engine: Any, args: argparse.Namespace, text: Tensor, seed: int, index: int) -> Tensor:
    """Micro-batch `index` of this rank, the same in all runs of the seed."""
    of_all = index * dist.get_world_size() + dist.get_rank()
    return sample_batch(text, engine.train_micro_batch_size_per_gpu(), args.seq_len, seed, of_all).to(engine.device)


@torch.no_grad()
def held_out_loss(engine: Any, args: argparse.Namespace, text: Tensor) -> float:
    """Mean over the same windows in all runs."""
    engine.eval()
    losses = [loss_of(engine, args, batch_of(engine, args, text, 0, k)).float() for k in range(args.held_out_batches)]
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def train(args: argparse.Namespace, config: dict[str, Any], seed: int, text: dict[str, Tensor]) -> list[list[Any]]:
    """Rows of a run: step, training loss, held-out loss or nothing."""
    torch.manual_seed(seed)
    model = build_model(args)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    if args.compile:
        engine.compile()
    evaluated = {round(args.steps * k / args.evaluations) for k in range(1, args.evaluations + 1)}
    accumulation = engine.gradient_accumulation_steps()
    rows: list[list[Any]] = [[0, "", held_out_loss(engine, args, text["held_out"])]]
    for step in range(args.steps):
        losses = []
        for index in range(step * accumulation, (step + 1) * accumulation):
            loss = loss_of(engine, args, batch_of(engine, args, text["train"], seed, index))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        is_evaluated = step + 1 in evaluated
        at_end = held_out_loss(engine, args, text["held_out"]) if is_evaluated else ""
        rows.append([step + 1, mean_over_ranks(torch.stack(losses).mean()), at_end])
    engine.destroy()
    del engine, model, parameters, loss
    gc.collect()
    get_accelerator().empty_cache()
    return rows


def run_missing(
    args: argparse.Namespace, name: str, config: dict[str, Any], seed: int, text: dict[str, Tensor]
) -> Path:
    """The file with the losses of a run, which is trained if it is not there yet."""
    config = copy.deepcopy(config)
    if "fp8" in config:  # its loss is the question, not its speed
        config["fp8"]["linear"] = {"min_size": 0, **config["fp8"].get("linear", {})}
    if "fp8" in config and Fp8Config.from_block(config["fp8"]).optimizer.states == "fp8":
        # Else what states round by would be the same in all pairs.
        config["fp8"].setdefault("optimizer", {}).setdefault("seed", seed)
    log = args.out / f"{name}-s{seed}.csv"
    shared = {
        key: str(value) for key, value in vars(args).items() if key not in ("config", "seeds", "out", "local_rank")
    }
    settings = json.dumps({**shared, "ranks": dist.get_world_size(), "config": config}, indent=1)
    known = log.with_suffix(".json").read_text() if log.exists() else None
    found = [known]
    dist.broadcast_object_list(found)  # other hosts may not see the folder
    if found[0] not in (None, settings):
        raise SystemExit(f"--out: expected runs of these settings, got {log} of others. Name another folder.")
    if found[0] is None:
        rows = train(args, config, seed, text)
        if dist.get_rank() == 0:
            part = log.with_suffix(".part")
            with part.open("w", newline="") as file:
                csv.writer(file).writerows([["step", "train_loss", "held_out_loss"], *rows])
            log.with_suffix(".json").write_text(settings)
            os.replace(part, log)
            print(f"{log}: held-out loss {rows[0][2]:.4f} -> {rows[-1][2]:.4f}", flush=True)
    return log


def compare(runs: dict[str, list[Path]]) -> None:
    """Says what `fp8-ds compare` finds; its verdict is that of the held-out losses after the last step."""
    groups = [f"{name}={','.join(map(str, logs))}" for name, logs in runs.items()]
    of_column = {"train_loss": ["--last", "0.1"], "held_out_loss": ["--last", "0"]}
    for column, options in of_column.items():
        options = ["--column", column, *options]
        print(f"fp8-ds compare {' '.join([*groups, *options])}", flush=True)
        code = subprocess.run([sys.executable, "-m", "fp8_ds.cli.app", "compare", *groups, *options]).returncode
        if code > 1:  # 1: not at parity, which is an answer
            raise SystemExit(code)


def main() -> None:
    args = parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for key, value in alone.items() if "RANK" not in os.environ else ():
        os.environ[key] = str(value)
    deepspeed.init_distributed()
    args.out.mkdir(parents=True, exist_ok=True)
    arms, text = arms_of(args), read_text(args)
    for split, tokens in text.items():
        if len(tokens) <= args.seq_len:
            raise SystemExit(f"--text: expected more than --seq-len tokens to {split}, got {len(tokens)}. Name more.")
    runs: dict[str, list[Path]] = {name: [] for name in arms}
    for seed in range(args.seeds):  # by seed, so that a study that is cut short has whole pairs
        for name, config in arms.items():
            runs[name].append(run_missing(args, name, config, seed, text))
    if dist.get_rank() == 0:
        compare(runs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
