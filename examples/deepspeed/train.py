"""Train a byte-level Llama-style model on the source of the Python standard library, under any config of configs/.

    deepspeed examples/deepspeed/train.py --deepspeed_config configs/ds_zero3_fp8.json --steps 200

This is an ordinary DeepSpeed script plus one line, `import fp8_ds`. What runs in FP8 is decided by the "fp8" block of
the JSON file; without that block the import changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from data import read_stdlib, sample_batch
from model import SIZES, ByteLlama
from tqdm import tqdm

import fp8_ds  # noqa: F401  (the only line that a bf16 DeepSpeed script does not have)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, type=Path, help="a JSON file of configs/")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, those before --resume included")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--held-out-batches", type=int, default=8, help="micro-batches per rank of the last loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="checkpoint folder")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --save")
    parser.add_argument("--log", type=Path, help="file for one JSON line per step: step, loss, lr, tokens_per_s")
    parser.add_argument("--print-every", type=int, default=10, help="steps between lines where there is no terminal")
    args = parser.parse_args(argv)
    if args.resume and args.save is None:
        parser.error("--resume needs --save DIR, the folder to continue from")
    return args


def build_engine(args: argparse.Namespace) -> Any:
    config = json.loads(args.deepspeed_config.read_text())
    if "scheduler" in config:  # the learning rate ends where training ends
        params = config["scheduler"]["params"]
        params["total_num_steps"] = args.steps
        params["warmup_num_steps"] = min(params["warmup_num_steps"], args.steps)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = ByteLlama(SIZES[args.size])
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_step(engine: Any, args: argparse.Namespace, text: torch.Tensor, step: int) -> float:
    """One optimizer step over the next micro-batches; returns the mean loss over ranks and micro-batches."""
    accumulation, world_size = engine.gradient_accumulation_steps(), dist.get_world_size()
    total = torch.zeros((), device=engine.device)
    for micro in range(accumulation):
        index = (step * accumulation + micro) * world_size + dist.get_rank()
        tokens = sample_batch(text, engine.train_micro_batch_size_per_gpu(), args.seq_len, args.seed, index)
        loss = engine(tokens.to(engine.device))
        engine.backward(loss)
        engine.step()
        total += loss.detach() / accumulation
    return mean_over_ranks(total)


@torch.no_grad()
def held_out_loss(engine: Any, args: argparse.Namespace) -> float:
    """Mean loss on files that training never reads; the same windows for every seed."""
    text = read_stdlib("held_out")
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for batch in range(args.held_out_batches):
        index = batch * dist.get_world_size() + dist.get_rank()
        tokens = sample_batch(text, engine.train_micro_batch_size_per_gpu(), args.seq_len, seed=0, index=index)
        total += engine(tokens.to(engine.device)).float() / args.held_out_batches
    engine.train()
    return mean_over_ranks(total)


def train(
    args: argparse.Namespace, around_middle_step: Callable[[Any], AbstractContextManager[Any]] = nullcontext
) -> Any:
    """Runs the training and returns the engine, which `around_middle_step` gets too (the demo measures there)."""
    engine = build_engine(args)
    text = read_stdlib("train")
    first = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(str(args.save))
        if path is None:
            raise FileNotFoundError(
                f"--resume expects a checkpoint in {args.save}, found none. Train with --save first."
            )
        first = client_state["step"]
    leader = dist.get_rank() == 0
    if leader and args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
    log = args.log.open("a" if first else "w") if leader and args.log else None
    num_tokens = engine.train_batch_size() * args.seq_len
    bar = tqdm(range(first, args.steps), disable=not (leader and sys.stderr.isatty()), unit="step")
    for step in bar:
        start = time.perf_counter()
        is_last = step == args.steps - 1
        with around_middle_step(engine) if step == (first + args.steps) // 2 else nullcontext():
            loss = train_step(engine, args, text, step)
        tokens_per_s = num_tokens / (time.perf_counter() - start)
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{tokens_per_s:.0f}")
        if leader and bar.disable and (is_last or step % args.print_every == 0):
            print(f"step {step:5d}  loss {loss:.4f}  {tokens_per_s:8.0f} tokens/s", flush=True)
        if log:
            record = {"step": step, "loss": loss, "lr": engine.get_lr()[0], "tokens_per_s": tokens_per_s}
            print(json.dumps(record), file=log, flush=True)
        if args.save and ((step + 1) % args.save_every == 0 or is_last):
            engine.save_checkpoint(str(args.save), client_state={"step": step + 1})
    held_out = held_out_loss(engine, args)
    if leader:
        print(f"held-out loss {held_out:.4f} nats per byte", flush=True)
    if log:
        print(json.dumps({"step": args.steps, "held_out_loss": held_out}), file=log)
        log.close()
    return engine


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()
