"""One run of a parity study: trains, writes its CSV as it goes, renames it when it is done.

On one device, or under torchrun on several, data parallel: each rank takes its part of a step's sequences.

Arms under DeepSpeed differ in the "fp8" block only; the two rivals without DeepSpeed are a plain loop with the same
model, data, clipping and learning rates. All arms of a seed start from the same weights, representable in bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.config import ScheduleConfig
from fp8_ds.device import uses_cuda
from fp8_ds.parity.arms import changed, seeded
from fp8_ds.parity.loop import Length, State, device_ranks
from fp8_ds.parity.loop import train as train_in_pieces
from fp8_ds.parity.text import Windows
from fp8_ds.schedule import PrecisionSchedule
from fp8_ds.testing.processes import leave
from parity import first_weights
from parity.arms import ARMS, SCHEDULED, WITHOUT_DEEPSPEED
from parity.emulated import EMULATED, emulate
from parity.models import GPT, SIZES, WEIGHT_DECAY, Size, mean_cross_entropy, param_groups
from parity.studies import Job

BETAS, EPS, CLIP = (0.9, 0.95), 1e-8, 1.0
WARMUP = 0.05
"""Share of the steps over which the learning rate rises; then linearly to zero (regimes 1, 3) or constant (2)."""
_TAG = "piece"
IDENTITY, CODE = "identity", "code"
"""Of a finished run in the cache: what it was, and `code_digest`."""
_TRAIN = ("arms", "data", "emulated", "first_weights", "models", "worker")
"""Modules beside this one; the others choose runs and compare them."""


class Taker:
    """One way to take a step: `take(tokens, lr) -> loss`, `loss(tokens)` without gradients, its state in a folder."""

    model: nn.Module

    def take(self, tokens: Tensor, lr: float) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def weights_in_bf16(self) -> dict[str, Tensor] | None:
        """Those that FP8 ones stand for, rounded to bf16, as a saved model has them; None: it computes in bf16."""
        return None


class EngineTaker(Taker):
    """Under DeepSpeed: stock without an "fp8" block, ours with one."""

    def __init__(self, model: GPT, args: argparse.Namespace) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        import fp8_ds  # noqa: F401

        optimizer: dict[str, Any] = {"lr": args.lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        if get_accelerator().device_name() == "cpu":
            optimizer["torch_adam"] = True
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SIZES[args.size].batch // (args.micro_batches * world_size()),
            "gradient_accumulation_steps": args.micro_batches,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": optimizer},
            "zero_optimization": {"stage": args.stage},
            "steps_per_print": 1_000_000_000,
        }
        self.emulated = args.arm in EMULATED
        if self.emulated:
            emulate(model.blocks, EMULATED[args.arm])
            torch.manual_seed(args.seed)  # a run that is gone on with draws other numbers, and moves on from the start
        if (block := fp8_block(args)) is not None:
            config["fp8"] = block
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model), config=config)
        self.model = self.engine.module
        self.micro_batches = args.micro_batches
        if args.arm == "e4m11-nearest":
            round_to_nearest(self.engine.optimizer)
        if args.compile:
            self.engine.compile()

    def take(self, tokens: Tensor, lr: float) -> Tensor:
        for group in self.engine.optimizer.param_groups:
            set_lr(group, lr)
        losses = []
        for part in tokens.chunk(self.micro_batches):
            loss = self.engine(part)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> Tensor:
        return self.engine(tokens)

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=_TAG)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag=_TAG)

    @torch.no_grad()
    def weights_in_bf16(self) -> dict[str, Tensor] | None:
        if self.emulated:
            return {name: p.detach().bfloat16() for name, p in self.engine.module.named_parameters()}
        if getattr(self.engine, "fp8", None) is None:
            return None
        self.engine.set_layer_precision("", "bf16")  # all layers; their weights are decoded from the masters
        return {name: p.detach().bfloat16() for name, p in self.engine.module.named_parameters()}


def fp8_block(args: argparse.Namespace) -> dict[str, Any] | None:
    """The arm's own, with what depends on the run: seed and length. None: stock."""
    of_arm = ARMS[args.arm]
    if of_arm is None:
        return None
    block = seeded(of_arm, args.seed)
    if args.arm in SCHEDULED:
        block = changed(block, {"schedule": {"total_steps": args.steps}})
    return block


class PlainTaker(Taker):
    """bf16 weights and no master: torchao's FP8 Adam with stochastic rounding, or torch's, rounded to nearest."""

    def __init__(self, model: GPT, args: argparse.Namespace) -> None:
        self.model = model
        if args.arm == "torchao":
            from torchao.optim import AdamWFp8

            self.optimizer: Any = AdamWFp8(param_groups(model), args.lr, BETAS, EPS, bf16_stochastic_round=True)
        else:
            self.optimizer = torch.optim.AdamW(param_groups(model), args.lr, BETAS, EPS, fused=True)
        if args.compile:
            model.compile()

    def take(self, tokens: Tensor, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            set_lr(group, lr)
        loss = self.model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "run.pt")

    def load(self, folder: Path) -> None:
        weights, states = torch.load(folder / "run.pt", weights_only=False)  # torchao's states are tensors of its own
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)


def set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def round_to_nearest(optimizer: Any) -> None:
    """Switch stochastic rounding off in the Fp8AdamW that is or is inside `optimizer`."""
    candidates = [optimizer, getattr(optimizer, "optimizer", None)]
    for candidate in candidates:
        if hasattr(candidate, "fp8_round_to_nearest"):
            candidate.fp8_round_to_nearest = True
            return
    names = [type(candidate).__name__ for candidate in candidates]
    raise RuntimeError(
        f"Expected an optimizer with the switch fp8_round_to_nearest, got {names}. The control needs it."
    )


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Of step 0, 1, ...: warm-up, then to zero in regimes 1 and 3, constant in regime 2."""
    warm = max(1, round(WARMUP * args.steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    return args.lr if args.regime == 2 else args.lr * (args.steps - step) / (args.steps - warm)


def training_windows(windows: Windows, args: argparse.Namespace, batch: int) -> Tensor:
    """[steps, batch] windows. Regimes 2 and 3 read on where their first weights stopped, in an order of their seed."""
    count = args.steps * batch
    if args.regime == 1:
        return windows.order(count, args.seed).view(args.steps, batch)
    skip = round(args.checkpoint_at * args.steps) * batch
    rest = windows.order(skip + count, 0)[skip:]
    shuffle = torch.randperm(count, generator=torch.Generator().manual_seed(104729 + args.seed))
    return rest[shuffle].view(args.steps, batch)


class Run:
    """What the loop drives: batches of text, the learning rate, evaluations."""

    def __init__(self, taker: Taker, args: argparse.Namespace, device: torch.device) -> None:
        self.taker, self.args, self.size = taker, args, SIZES[args.size]
        self.ranks = device_ranks(device)
        self.windows = Windows(args.cache / "train.npy", self.size.seq_len, device)
        self.held_out = Windows(args.cache / "held_out.npy", self.size.seq_len, device)
        self.order = training_windows(self.windows, args, self.size.batch).to(device)

    def step(self, number: int) -> Tensor:
        mine = of_this_rank(self.order[number])
        return self.taker.take(self.windows.batch(mine), learning_rate(self.args, number))

    def evaluate(self) -> float:
        return self.loss_of(self.taker)

    def loss_of(self, taker: Taker) -> float:
        """Held-out loss of what has the same weights on all ranks."""
        return self.ranks.mean(evaluate(taker, self.held_out, self.size))

    def save(self, folder: Path) -> None:
        self.taker.save(folder)

    def load(self, folder: Path) -> None:
        self.taker.load(folder)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def of_this_rank(windows: Tensor) -> Tensor:
    """Its part of a batch, as large as every other rank's."""
    return windows.chunk(world_size())[int(os.environ.get("RANK", "0"))]


def evaluate(taker: Taker, held_out: Windows, size: Size) -> float:
    """Mean held-out loss of this rank's part; the same windows for all arms, seeds and steps."""
    num = min(-(-size.held_out_tokens // size.seq_len), held_out.num_windows)
    num = max(size.batch, num // size.batch * size.batch)
    taker.model.eval()
    batches = torch.arange(num).split(size.batch)
    losses = [taker.loss(held_out.batch(of_this_rank(batch))).double() for batch in batches]
    taker.model.train()
    return float(torch.stack(losses).mean())


class Exported(Taker):
    """A plain model in bf16, to evaluate."""

    def __init__(self, size: Size, vocab_size: int, weights: dict[str, Tensor], device: torch.device) -> None:
        model = GPT(size, vocab_size, seed=0).to(device, torch.bfloat16)
        model.load_state_dict(weights)
        self.model = model


def train(args: argparse.Namespace, device: torch.device, end: float) -> dict[str, Any] | None:
    """One run up to `end`; returns what the log has no column for, or None: its state is kept."""
    size = SIZES[args.size]
    text = json.loads((args.cache / "text.json").read_text())
    # GEMMs in FP8 want multiples of 16, and bf16 ones are faster at multiples of 64.
    vocab_size = -(-text["vocab_size"] // 64) * 64
    model = GPT(size, vocab_size, args.seed)
    if args.regime != 1:
        model.load_state_dict(first_weights.load(args.checkpoint))
    model.to(device)
    if device.type == "cuda":
        model.loss = torch.compile(mean_cross_entropy)
    num_parameters = sum(p.numel() for p in model.parameters())
    taker: Taker = (PlainTaker if args.arm in WITHOUT_DEEPSPEED else EngineTaker)(model, args)
    checkpoint = file_digest(args.checkpoint) if args.regime != 1 else None
    identity, code = identity_of(args, world_size(), text["digest"], checkpoint), code_digest()
    run = Run(taker, args, device)
    length = Length(args.steps, size.batch * size.seq_len)
    state = State(args.state, identity, run.ranks, _branches(args, identity, run, length)) if args.state else None
    save_at = round(args.checkpoint_at * args.steps) if args.save_checkpoint else -1

    def after_step(step: int) -> bool:
        if step == save_at and run.ranks.writes:
            first_weights.save(taker.model.named_parameters(), args.save_checkpoint)
        return step == save_at and args.only_checkpoint

    seconds = train_in_pieces(run, length, args.log, state, end, run.ranks, after_step)
    if seconds is None:
        return None
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None
    report = getattr(getattr(taker, "engine", None), "fp8_report", None)
    return {
        "parameters": num_parameters,
        "tokens_per_second": round(args.steps * size.batch * size.seq_len / seconds),
        "peak_gib": peak,
        "plan": report().get("plan") if report else None,
        "digest": text["digest"],
        "checkpoint": checkpoint,
        IDENTITY: identity,
        CODE: code,
    } | _evaluated_in_bf16(run, vocab_size, device)


def identity_of(args: argparse.Namespace, ranks: int, digest: str, checkpoint: str | None) -> dict[str, Any]:
    """What decides what a run trains, but for the code.

    Args:
        args: of the run.
        digest: of the text.
        checkpoint: digest of its first weights; None: drawn, as in regime 1.
    """
    names = ("regime", "arm", "seed", "steps", "lr", "size", "stage", "compile", "checkpoint_at", "only_checkpoint")
    found = {name: getattr(args, name) for name in (*names, "micro_batches")}
    return {**found, "digest": digest, "checkpoint": checkpoint, "gpus_per_run": ranks}


def code_digest() -> str:
    """Of what of ours a run computes with."""
    here = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*(here / f"{name}.py" for name in _TRAIN), *(here.parents[1] / "fp8_ds").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _branches(args: argparse.Namespace, identity: dict[str, Any], run: Run, length: Length) -> dict[int, list[State]]:
    """Where to leave this run's state for the arms of --branches, by steps taken."""
    found: dict[int, list[State]] = {}
    for arm in args.branches:
        folder = args.state.parent / Job(args.regime, arm, args.seed).name
        step = branches_off_after(arm, args.steps) // length.log_every * length.log_every
        if step:
            found.setdefault(step, []).append(State(folder, {**identity, "arm": arm}, run.ranks))
    return found


def branches_off_after(arm: str, steps: int) -> int:
    """Steps that an arm of `SCHEDULED` has in common with its trunk."""
    block = ARMS[arm]
    assert block is not None
    last = PrecisionSchedule.of(ScheduleConfig(**block["schedule"], total_steps=steps), (), None).last
    assert last is not None
    return last


def _evaluated_in_bf16(run: Run, vocab_size: int, device: torch.device) -> dict[str, float]:
    """What of an FP8 run's loss is in its weights, and not in the rounding of the evaluation's own forward."""
    weights = run.taker.weights_in_bf16()
    if weights is None:
        return {}
    return {"held_out_loss_bf16": run.loss_of(Exported(run.size, vocab_size, weights, device))}


def file_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--regime", type=int, choices=[1, 2, 3], required=True)
    parser.add_argument("--arm", choices=list(ARMS), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile the whole model, not only the loss")
    parser.add_argument("--micro-batches", type=int, default=1, help="that a step's batch is cut into")
    parser.add_argument("--cache", type=Path, required=True, help="train.npy, held_out.npy, text.json")
    parser.add_argument("--checkpoint", type=Path, help="first weights of regimes 2 and 3")
    parser.add_argument("--checkpoint-at", type=float, default=1.0, help="share of regime 1 after which it was saved")
    parser.add_argument("--save-checkpoint", type=Path)
    parser.add_argument("--only-checkpoint", action="store_true", help="end when it is saved")
    parser.add_argument("--log", type=Path, required=True, help="CSV; beside it, .json")
    parser.add_argument("--state", type=Path, help="folder of the run between two pieces")
    parser.add_argument("--branches", nargs="*", default=[], choices=SCHEDULED, help="arms that go on from this run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this piece, start-up included")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    end = time.monotonic() + args.seconds
    if uses_cuda():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        device = torch.device("cpu")
    about = train(args, device, end)
    if about is not None and os.environ.get("RANK", "0") == "0":
        part = args.log.with_suffix(".json.part")  # whole or not there: the next call reads it
        part.write_text(json.dumps(about))
        os.replace(part, args.log.with_suffix(".json"))


if __name__ == "__main__":
    main()
    leave()
