"""How far gradients with FP8 linears are from those of float32: by recipe, format of gradients, accumulation.

    python benchmarks/gradient_error.py --out benchmarks/results   # H200, after gpt_parity.py --only-first-weights
    python benchmarks/gradient_error.py --each --batches 2 --out benchmarks/results      # by linear
    python benchmarks/gradient_error.py --dry-run --out .out       # CPU, tiny, random weights and tokens

The model, its text and its weights are those of gpt_parity.py (124 M parameters; the first weights of regimes 2 and 3,
in its cache). Every arm computes the gradients of the same bf16 weights on the same batches: bf16, and FP8 linears with
scales of the weights as they are. "dB" is SQNR over all weights of FP8 linears, of one batch; "worst" is that of the
worst of them; "bias" is the part of the gradient that the error takes away or adds, by least squares; "loss" is the
mean loss of the same batches against float32's.

Arms "..., ends in bf16" leave the first and the last block in bf16; of 12 blocks. Predicted: 0.8 to 1.2 dB better than
without, as fewer blocks add noise (10/12 of its power), and a loss 0.035 to 0.05 % above; more would say that the ends
are worse than the rest.

With --each every linear is in FP8 by itself, all others in bf16: its share of the noise that all together make, and
what it adds to the loss. Predicted: shares add up to 0.9 to 1.1; those of the two blocks at the ends to 0.4 to 0.45,
most of it from the first block's qkv and up and the last one's down; four linears of 48 have a third of the noise.

Predicted: bf16 at 35 dB or more; FP8 linears some 20 with E5M2 gradients, 2 to 3 more with E4M3; fast accumulation
within 0.1 dB of accurate in all, its bias within 0.001 of the accurate one's; the loss of every FP8 arm 0.05 % above.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from parity import first_weights
from parity.models import GPT, SIZES, Size
from results_io import dated_stem, heading
from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.nn import apply_plan, make_plan
from fp8_ds.parity.text import Windows

ARMS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "tensorwise": {},
    "tensorwise, fast grad_input": {"fast_accumulation": "output_and_grad_input"},
    "tensorwise, all fast": {"fast_accumulation": "all"},
    "tensorwise, E4M3 gradients": {"grad_dtype": "e4m3"},
    "tensorwise, E4M3 gradients, all fast": {"grad_dtype": "e4m3", "fast_accumulation": "all"},
    "rowwise": {"recipe": "rowwise"},
    "rowwise, E4M3 gradients": {"recipe": "rowwise", "grad_dtype": "e4m3"},
    "gw_hp": {"recipe": "rowwise_with_gw_hp"},
    "gw_hp, E4M3 gradients": {"recipe": "rowwise_with_gw_hp", "grad_dtype": "e4m3"},
    "blockwise": {"recipe": "blockwise"},
}

ENDS = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
WITH_ENDS: dict[str, dict[str, Any] | None] = {
    "tensorwise, ends in bf16": ENDS,
    "tensorwise, E4M3 gradients, ends in bf16": {"grad_dtype": "e4m3", **ENDS},
}
"""Further arms, with the first and the last block in bf16: outlier layers are often found there."""
LINEARS = ("qkv", "out", "up", "down")
BF16, ALL = "bf16", "tensorwise"
"""What each linear's share is of, beside what bf16 does by itself."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Error:
    """Of one arm, means over batches but for the worst."""

    arm: str
    db: float
    worst_db: float
    worst: str
    bias: float
    loss_percent: float


def gradients(model: GPT, tokens: Tensor) -> tuple[Gradients, float]:
    """Of the weights of the blocks' linears, float32; and the loss."""
    model.zero_grad()
    loss = model(tokens)
    loss.backward()
    found = {name: p.grad.float() for name, p in model.blocks.named_parameters() if p.ndim == 2 and p.grad is not None}
    return found, float(loss.detach())


def arm_model(
    weights: dict[str, Tensor], size: Size, vocab_size: int, block: dict[str, Any] | None, device: str
) -> GPT:
    model = GPT(size, vocab_size, seed=0)
    model.load_state_dict(weights)
    model.to(device)
    if block is not None:
        config = LinearConfig.model_validate(block)
        config.check()
        history = apply_plan(model, make_plan(model, config), config, torch.device(device))
        assert history is None
    return model


def db(signal: float, noise: float) -> float:
    return float(10 * torch.log10(torch.tensor(signal / max(noise, 1e-300), dtype=torch.float64)))


def compare(arm: str, pairs: list[tuple[tuple[Gradients, float], tuple[Gradients, float]]]) -> Error:
    """Args: pairs: (float32's, the arm's) of each batch."""
    signal = noise = product = 0.0
    by_name: dict[str, list[float]] = {}
    for (exact, _), (found, _) in pairs:
        for name, grad in exact.items():
            error = (found[name] - grad).double()
            of_name = [float(grad.double().square().sum()), float(error.square().sum())]
            by_name[name] = [a + b for a, b in zip(by_name.get(name, [0.0, 0.0]), of_name, strict=True)]
            signal, noise = signal + of_name[0], noise + of_name[1]
            product += float((error * grad.double()).sum())
    each = {name: db(*sums) for name, sums in by_name.items()}
    worst = min(each, key=lambda name: each[name])
    losses = [(exact, found) for (_, exact), (_, found) in pairs]
    percent = 100 * sum(found / exact - 1 for exact, found in losses) / len(losses)
    return Error(arm, db(signal, noise), each[worst], worst, product / signal, percent)


def arms_of(size: Size, each: bool) -> dict[str, dict[str, Any] | None]:
    """By name; without those with ends in bf16 where nothing is between the ends.

    Args:
        each: one for each linear of the blocks, in FP8 by itself, after bf16 and the one with all of them.
    """
    if not each:
        return ARMS | (WITH_ENDS if size.layers > 2 else {})
    names = [f"blocks.{layer}.{linear}" for layer in range(size.layers) for linear in LINEARS]
    alone = {name: {"filter_fqns": ["lm_head", *(other for other in names if other != name)]} for name in names}
    return {BF16: None, ALL: {}, **alone}


def measure(
    weights: dict[str, Tensor],
    batches: list[Tensor],
    size: Size,
    vocab_size: int,
    device: str,
    arms: dict[str, dict[str, Any] | None],
) -> list[Error]:
    model = arm_model(weights, size, vocab_size, None, device).float()
    exact = [gradients(model, tokens) for tokens in batches]
    found = []
    for arm, block in arms.items():
        model = arm_model(weights, size, vocab_size, block, device)
        found.append(compare(arm, [(each, gradients(model, t)) for each, t in zip(exact, batches, strict=True)]))
        print(found[-1], flush=True)
    return found


def report(errors: list[Error]) -> str:
    lines = ["| arm | dB | worst | which | bias | loss, % |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {e.arm} | {e.db:.2f} | {e.worst_db:.1f} | {e.worst} | {e.bias:+.4f} | {e.loss_percent:+.3f} |"
        for e in errors
    ]
    return "\n".join(lines) + "\n"


def report_each(errors: list[Error]) -> str:
    """Noise of linears by themselves, in per cent of that of all together; and what blocks add to the loss.

    Args:
        errors: of `arms_of(size, each=True)`.
    """
    floor = next(e for e in errors if e.arm == BF16)
    noise = {e.arm: 10 ** (-e.db / 10) - 10 ** (-floor.db / 10) for e in errors}
    loss = {e.arm: e.loss_percent - floor.loss_percent for e in errors}
    layers = (len(errors) - 2) // len(LINEARS)
    lines = [f"| block | {' | '.join(LINEARS)} | all of it | loss, % |", "|---|" + "---|" * (len(LINEARS) + 2)]
    total = dict.fromkeys(LINEARS, 0.0)
    for layer in range(layers):
        shares = {linear: 100 * noise[f"blocks.{layer}.{linear}"] / noise[ALL] for linear in LINEARS}
        total = {linear: total[linear] + share for linear, share in shares.items()}
        cells = " | ".join(f"{share:.1f}" for share in shares.values())
        added = sum(loss[f"blocks.{layer}.{linear}"] for linear in LINEARS)
        lines.append(f"| {layer} | {cells} | {sum(shares.values()):.1f} | {added:+.4f} |")
    cells = " | ".join(f"{share:.1f}" for share in total.values())
    lines.append(f"| all | {cells} | {sum(total.values()):.1f} | {loss[ALL]:+.4f} at once |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "fp8_ds_gpt_parity"))
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--each", action="store_true", help="every linear by itself")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU; random weights and tokens")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.dry_run:
        size = SIZES["tiny"]
        weights = GPT(size, size.vocab_size, seed=0).state_dict()
        batches = [torch.randint(size.vocab_size, (size.batch, size.seq_len + 1)) for _ in range(args.batches)]
        errors = measure(weights, batches, size, size.vocab_size, "cpu", arms_of(size, args.each))
    else:
        size = SIZES["124m"]
        vocab = json.loads((args.cache / "text.json").read_text())["vocab_size"]
        vocab_size = -(-vocab // 64) * 64
        windows = Windows(args.cache / "held_out.npy", size.seq_len, torch.device("cuda"))
        batches = [windows.batch(part) for part in torch.arange(args.batches * size.batch).split(size.batch)]
        weights = first_weights.load(args.cache / "checkpoint.pt")
        errors = measure(weights, batches, size, vocab_size, "cuda", arms_of(size, args.each))
    text = (report_each if args.each else report)(errors)
    stem = dated_stem(args.out, "gradient-error" + "-each" * args.each)
    stem.with_suffix(".md").write_text(heading(stem.name) + text)
    stem.with_suffix(".json").write_text(json.dumps([asdict(each) for each in errors], indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
