"""One arm of gpt_parity.py, on one device: trains, writes its CSV as it goes, renames it when it is done.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from gpt_parity_data import Windows
from torch import Tensor, nn

BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
HEAD_DIM = 64
WARMUP = 0.05
"""Share of the steps over which the learning rate rises; then linearly to zero (regime 1) or constant (regime 2)."""
NUM_EVALUATIONS = 10
LOG_EVERY = 10


@dataclass(frozen=True)
class Size:
    """A GPT-2 without biases: rotary positions, RMSNorm, GELU, untied head.

    Rotary, not learned: with learned ones the jump in which a model learns to copy from its context came at steps 1,200
    to 1,600 of 3,072, earlier or later by chance, and left paired runs 0.3 % apart (results of 2026-11-21).
    """

    layers: int
    dim: int
    vocab_size: int
    seq_len: int
    batch: int
    held_out_tokens: int


SIZES = {
    # 12 x 7.08 M + 2 x 25216 x 768 = 123.7 M parameters, as GPT-2 small with its tied 50257.
    "124m": Size(12, 768, 25216, 1024, 32, 1_048_576),
    "tiny": Size(2, 64, 512, 64, 4, 2048),
}
E4M11 = {"enabled": True, "optimizer": {"states": "fp8", "master": "e4m11"}}
ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "fp8": {"enabled": True},
    "e4m19": {"enabled": True, "optimizer": {"states": "fp8", "master": "e4m19"}},
    "e4m11": E4M11,
    "e4m11-nearest": E4M11,
    "fp8-bf16-last": {"enabled": True, "schedule": {"bf16_last_fraction": 0.1}},
    "e4m11-bf16-last": {**E4M11, "schedule": {"bf16_last_fraction": 0.1}},
    "torchao": None,
    "bf16-nearest": None,
}
"""The "fp8" block of each arm. "-nearest": without stochastic rounding, the controls of regime 2."""
SCHEDULED = ("fp8-bf16-last", "e4m11-bf16-last")
"""The last tenth of the steps computes in bf16. Only where they are asked for by name."""
WITHOUT_DEEPSPEED = ("torchao", "bf16-nearest")


ROTARY_BASE = 10_000.0


@cache
def rotary_table(seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, float32 [seq_len, HEAD_DIM / 2]."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(seq_len, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [batch, heads, seq_len, HEAD_DIM] by their positions, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seq_len, 3, -1, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq_len, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Args: seed: of the initial weights, which are bf16 numbers."""

    def __init__(self, size: Size, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, vocab_size, bias=False)
        self.loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers if is_residual else 1), generator=generator)
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats, float32 scalar, of int64 tokens [batch, seq_len + 1]."""
        x = self.wte(tokens[:, :-1])
        cos, sin = rotary_table(tokens.shape[1] - 1, tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(self.lm_head(self.norm(x)), tokens[:, 1:])


class Trainer:
    """One way to take a step: `step(tokens, lr) -> loss` and `loss(tokens)` without gradients."""

    model: nn.Module

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


class EngineTrainer(Trainer):
    """Under DeepSpeed: stock without an "fp8" block, ours with one."""

    def __init__(self, model: GPT, args: argparse.Namespace) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        import fp8_ds  # noqa: F401

        optimizer: dict[str, Any] = {"lr": args.lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        if get_accelerator().device_name() == "cpu":
            optimizer["torch_adam"] = True
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SIZES[args.size].batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": optimizer},
            "zero_optimization": {"stage": args.stage},
            "steps_per_print": 1_000_000_000,
        }
        if ARMS[args.arm] is not None:
            config["fp8"] = ARMS[args.arm]
        if args.arm in SCHEDULED:
            config["fp8"]["schedule"]["total_steps"] = args.steps
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model), config=config)
        self.model = self.engine.module
        if args.arm == "e4m11-nearest":
            round_to_nearest(self.engine.optimizer)
        if args.compile and not args.only_checkpoint:
            self.engine.compile()

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        for group in self.engine.optimizer.param_groups:
            set_lr(group, lr)
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> Tensor:
        return self.engine(tokens)


class PlainTrainer(Trainer):
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

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            set_lr(group, lr)
        loss = self.model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


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


def evaluate(trainer: Trainer, held_out: Windows, size: Size) -> float:
    """Mean held-out loss; the same windows for all arms, seeds and steps."""
    num = min(-(-size.held_out_tokens // size.seq_len), held_out.num_windows)
    num = max(size.batch, num // size.batch * size.batch)
    trainer.model.eval()
    losses = [trainer.loss(held_out.batch(part)).double() for part in torch.arange(num).split(size.batch)]
    trainer.model.train()
    return float(torch.stack(losses).mean())


def train(args: argparse.Namespace, device: torch.device, log: TextIO) -> dict[str, Any]:
    """One run; returns what the log has no column for."""
    size = SIZES[args.size]
    text = json.loads((args.cache / "text.json").read_text())
    windows = Windows(args.cache / "train.npy", size.seq_len, device)
    held_out = Windows(args.cache / "held_out.npy", size.seq_len, device)
    # GEMMs in FP8 want multiples of 16, and bf16 ones are faster at multiples of 64.
    model = GPT(size, -(-text["vocab_size"] // 64) * 64, args.seed)
    if args.regime != 1:
        model.load_state_dict(torch.load(args.checkpoint, weights_only=True))
    model.to(device)
    if device.type == "cuda":
        model.loss = torch.compile(mean_cross_entropy)
    num_parameters = sum(p.numel() for p in model.parameters())
    trainer = (PlainTrainer if args.arm in WITHOUT_DEEPSPEED else EngineTrainer)(model, args)
    order = training_windows(windows, args, size.batch).to(device)
    stops = {round(args.steps * k / NUM_EVALUATIONS) for k in range(1, NUM_EVALUATIONS + 1)}
    print("step,tokens,seconds,train_loss,held_out_loss", file=log)
    print(f"0,0,0,,{evaluate(trainer, held_out, size):.6f}", file=log, flush=True)
    seconds, mark, total, since = 0.0, time.perf_counter(), torch.zeros((), device=device), 0
    save_at = round(args.checkpoint_at * args.steps) if args.save_checkpoint else -1
    for step in range(1, args.steps + 1):
        total += trainer.step(windows.batch(order[step - 1]), learning_rate(args, step - 1))
        since += 1
        if step == save_at:
            weights = {name: p.detach().to("cpu", torch.bfloat16) for name, p in trainer.model.named_parameters()}
            torch.save(weights, args.save_checkpoint.with_suffix(".part"))
            os.replace(args.save_checkpoint.with_suffix(".part"), args.save_checkpoint)
            if args.only_checkpoint:
                break
        if step % LOG_EVERY and step not in stops:
            continue
        mean = float(total) / since  # waits for the device
        seconds += time.perf_counter() - mark
        value = f"{evaluate(trainer, held_out, size):.6f}" if step in stops else ""
        tokens = step * size.batch * size.seq_len
        print(f"{step},{tokens},{seconds:.2f},{mean:.6f},{value}", file=log, flush=True)
        total.zero_()
        since, mark = 0, time.perf_counter()
        if not math.isfinite(mean):
            raise SystemExit(f"The training loss is {mean} at step {step}: this arm diverged.")
    report = getattr(getattr(trainer, "engine", None), "fp8_report", None)
    return {
        "parameters": num_parameters,
        "tokens_per_second": round(args.steps * size.batch * size.seq_len / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "plan": report().get("plan") if report else None,
        "digest": text["digest"],
        "checkpoint": file_digest(args.checkpoint) if args.regime != 1 else None,
    }


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
    parser.add_argument("--cache", type=Path, required=True, help="train.npy, held_out.npy, text.json")
    parser.add_argument("--checkpoint", type=Path, help="first weights of regimes 2 and 3")
    parser.add_argument("--checkpoint-at", type=float, default=1.0, help="share of regime 1 after which it was saved")
    parser.add_argument("--save-checkpoint", type=Path)
    parser.add_argument("--only-checkpoint", action="store_true", help="end when it is saved")
    parser.add_argument("--log", type=Path, required=True, help="CSV; beside it, .json")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        device = torch.device("cpu")
    if args.only_checkpoint:
        # Another machine of this kind should make the same weights, so that runs there are pairs of runs here.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    part = args.log.with_suffix(".part")
    with part.open("w") as log:
        about = train(args, device, log)
    args.log.with_suffix(".json").write_text(json.dumps(about))
    os.replace(part, args.log)


if __name__ == "__main__":
    main()
