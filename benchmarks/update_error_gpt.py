"""Update error of FP8 moments on real gradients: a GPT of 86 M parameters on bytes of the standard library's sources.

    python benchmarks/update_error_gpt.py --out DIR      # one H200, a minute

The model trains with torch's fused AdamW in float32 (bf16 autocast, clipping, gradients rounded to bf16). A shadow
`Fp8AdamW` sees the same weights and gradients in every step and keeps moments of its own. Printed for each kind of
parameter: relative L2 error of its update against torch's, the gain (projection on torch's update, 1 is unbiased) and
the largest |update| of both.

Prediction, written before the first run: error .07 (docs/numerics.md, middle family), gain within 1 % of 1.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import sys
import sysconfig
from pathlib import Path

import torch
from parity.models import GPT, Size, param_groups
from results_io import command_line, dated_stem, device_name
from torch import Tensor, nn

from fp8_ds import Fp8AdamW

BETAS, EPS, LR, WARMUP, CLIP = (0.9, 0.95), 1e-8, 6e-4, 150, 1.0


def text(num_files: int, device: str) -> Tensor:
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/**/*.py", recursive=True))[:num_files]
    raw = b"".join(Path(file).read_bytes() for file in files)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def kind_of(name: str) -> str:
    return name.split(".")[-2] if name.startswith("blocks") else name.split(".")[0]


def compare(updates: list[tuple[str, Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """By kind of parameter, from (name, torch's update, ours)."""
    sums: dict[str, list[float]] = {}
    for name, exact, ours in updates:
        a = sums.setdefault(kind_of(name), [0.0] * 5)
        a[0] += float((ours - exact).square().sum())
        a[1] += float(exact.square().sum())
        a[2] += float((ours * exact).sum())
        a[3], a[4] = max(a[3], float(exact.abs().max())), max(a[4], float(ours.abs().max()))
    return {
        kind: {"error": math.sqrt(a[0] / a[1]), "gain": a[2] / a[1], "largest_exact": a[3], "largest_ours": a[4]}
        for kind, a in sums.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Update error of FP8 moments on a GPT's gradients.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--dry-run", action="store_true", help="CPU, two tiny layers, 12 steps")
    args = parser.parse_args()
    device = "cpu" if args.dry_run else "cuda"
    size = Size(2, 64, 256, 64, 4, 0) if args.dry_run else Size(12, 768, 256, 1024, 32, 0)
    steps = 12 if args.dry_run else args.steps
    data = text(20 if args.dry_run else 2500, device)
    model = GPT(size, 256, 0).float().to(device)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model)
    exact = torch.optim.AdamW(groups, LR, BETAS, EPS)
    params = [p for group in exact.param_groups for p in group["params"]]
    shadows = iter([nn.Parameter(p.detach().clone()) for p in params])
    ours = Fp8AdamW([{**g, "params": [next(shadows) for _ in g["params"]]} for g in groups], LR, BETAS, EPS)
    pairs = list(zip(params, [p for group in ours.param_groups for p in group["params"]], strict=True))
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(1, steps + 1):
        lr = LR * min(1.0, step / WARMUP)
        for group in exact.param_groups + ours.param_groups:
            group["lr"] = lr
        starts = torch.randint(0, data.numel() - size.seq_len - 1, (size.batch,), generator=generator).tolist()
        tokens = torch.stack([data[i : i + size.seq_len + 1] for i in starts]).long()
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        with torch.no_grad():
            for p, shadow in pairs:
                p.grad = p.grad.bfloat16().float()
                shadow.copy_(p)
                shadow.grad = p.grad.clone()
        is_shown = step in (10, 30) or step % max(steps // 7, 1) == 0
        before = [p.detach().clone() for p in params] if is_shown else []
        exact.step()
        ours.step()
        if is_shown:
            updates = []
            for (p, shadow), old in zip(pairs, before, strict=True):
                start = old * (1 - lr * (0.1 if p.ndim == 2 else 0.0))
                updates.append((names[id(p)], (p.detach() - start) / lr, (shadow.detach() - start) / lr))
            rows.append({"step": step, "loss": loss.item(), "kinds": compare(updates)})
            shown = {kind: (round(v["error"], 3), round(v["gain"], 4)) for kind, v in rows[-1]["kinds"].items()}
            print(step, round(loss.item(), 4), shown, flush=True)
        exact.zero_grad()
        ours.zero_grad()
    if args.out is not None:
        result = {"command": command_line(), "device": device_name(), "torch": torch.__version__, "rows": rows}
        dated_stem(args.out, "update-error-gpt").with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
