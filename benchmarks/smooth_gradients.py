"""Where gradients change smoothly: the rows of a language model's head whose bytes seldom or never occur.

    python benchmarks/smooth_gradients.py --out DIR      # CPU, a minute

A small GPT trains on bytes with torch's AdamW; a shadow `Fp8AdamW` follows its head with FP8 moments, as they are and
with moments rounded to nearest. Printed by how often a row's byte occurs in the text: error and gain of the update, and
the median of stored over exact sqrt(v).

What led to it: rounded to nearest, what an element gains or loses against its group's largest in one step is below half
a code and is lost every time, unless noise dithers it. The synthetic families of docs/numerics.md are noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from parity.models import GPT, Size, param_groups
from results_io import command_line, dated_stem
from torch import nn
from update_error_gpt import BETAS, CLIP, EPS, LR, text

import fp8_ds.ops.adamw.reference as reference
from fp8_ds import Fp8AdamW
from fp8_ds.optim.moments import quantize_m, quantize_root

SIZE = Size(2, 128, 256, 128, 8, 0)
ROWS = {"never": (0, 1), "1 to 99": (1, 100), "100 to 2,999": (100, 3000), "3,000 and more": (3000, 1 << 62)}


@contextlib.contextmanager
def moments_rounded(how: str) -> Iterator[None]:
    """Moments as they are ("ours"), or rounded to nearest."""
    ours = reference.quantize_m, reference.quantize_root
    if how == "nearest":
        reference.quantize_m = lambda m, noise: quantize_m(m)
        reference.quantize_root = lambda root, noise: quantize_root(root)
    try:
        yield
    finally:
        reference.quantize_m, reference.quantize_root = ours


def run(rounding: str, steps: int) -> list[dict[str, float | int | str]]:
    torch.manual_seed(0)
    data = text(300, "cpu")
    counts = torch.bincount(data.long(), minlength=256)
    model = GPT(SIZE, 256, 0).float()
    head = model.lm_head.weight
    exact = torch.optim.AdamW(param_groups(model), LR, BETAS, EPS)
    shadow = nn.Parameter(head.detach().clone())
    ours = Fp8AdamW([shadow], LR, BETAS, EPS, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, float | int | str]] = []
    for step in range(1, steps + 1):
        lr = LR * min(1.0, step / 50)
        for group in exact.param_groups + ours.param_groups:
            group["lr"] = lr
        starts = torch.randint(0, data.numel() - 129, (SIZE.batch,), generator=generator).tolist()
        loss = model(torch.stack([data[i : i + 129] for i in starts]).long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            head.grad = head.grad.bfloat16().float()
            shadow.zero_()
            shadow.grad = head.grad.clone()
        before = head.detach().clone()
        exact.step()
        with moments_rounded(rounding):
            ours.step()
        if step % 100 == 0 or step == steps:
            u = (head.detach() - before * (1 - lr * 0.1)) / lr
            v = ours.read_moment(ours.core.shards[0], "exp_avg_sq").view_as(head)
            ratio = (v / exact.state[head]["exp_avg_sq"]).sqrt()
            for name, (low, high) in ROWS.items():
                rows = (counts >= low) & (counts < high)
                a, b = u[rows], shadow.detach()[rows] / lr
                found.append({
                    "rounding": rounding, "step": step, "occurs": name, "rows": int(rows.sum()),
                    "error": float((b - a).norm() / a.norm()), "gain": float((a * b).sum() / (a * a).sum()),
                    "root_ratio": float(ratio[rows].median()),
                })  # fmt: skip
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in found[-1].items()}, flush=True)
        exact.zero_grad()
        ours.zero_grad()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Rounding of v where gradients are smooth.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = run("nearest", args.steps) + run("ours", args.steps)
    if args.out is not None:
        result = {"command": command_line(), "torch": torch.__version__, "rows": rows}
        dated_stem(args.out, "smooth-gradients").with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
