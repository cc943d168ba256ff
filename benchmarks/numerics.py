"""The experiments behind docs/numerics.md: CSV files and plots in docs/img, one dated JSON in benchmarks/results.

    python benchmarks/numerics.py            # about five minutes on one core
    python benchmarks/numerics.py --quick    # seconds, into a folder of your choice: does it run?

Families, rivals and loops are those of tests/unit/optim, at a larger size and with more formats.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_plots import Row, plot_masters, plot_moments
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit/optim")]

import test_bound as bound  # noqa: E402
import test_masters as masters  # noqa: E402
import test_update_error as update_error  # noqa: E402

from fp8_ds.formats import E4M3, E4M4, E5M2, Float8Format  # noqa: E402
from fp8_ds.ops.adamw.reference import read_moments  # noqa: E402
from fp8_ds.optim import moments  # noqa: E402
from fp8_ds.optim.masters import BF16_8, E4M11, E4M19, FP32  # noqa: E402
from fp8_ds.optim.moments import GROUP  # noqa: E402

Scale = Callable[..., Tensor]
"""(amax of groups, largest of the format, smallest amax that counts) -> scale_inv."""
NOISE = torch.Generator().manual_seed(99)


def stored_as(fmt: Float8Format, rounding: str = "nearest") -> Callable[[Tensor], Tensor]:
    """[num_groups, 128] through `fmt`, a float32 scale per group. `rounding`: "nearest", "up" (from 0) or "random"."""

    def store(x: Tensor) -> Tensor:
        scale_inv = (x.abs().amax(1, keepdim=True) / fmt.max).clamp(min=1e-37)
        scaled = x.double() / scale_inv
        exponent = torch.frexp(scaled.abs().clamp(min=fmt.smallest_normal)).exponent - 1
        unit = torch.ldexp(torch.ones_like(scaled), exponent - fmt.mantissa_bits)
        steps = scaled.abs() / unit
        if rounding == "random":
            steps = (steps + torch.rand(steps.shape, generator=NOISE)).floor()
        else:
            steps = steps.round() if rounding == "nearest" else (steps - 1e-6).ceil()
        return ((steps * unit).clamp(max=fmt.max).copysign(scaled) * scale_inv).float()

    return store


def root_of(store: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """v stored as its square root."""
    return lambda v: store(v.sqrt()).square()


def exact(x: Tensor) -> Tensor:
    return x


def arms(numel: int, clamp: bool) -> dict[str, update_error.Ours | update_error.Stored]:
    """Every way to store the moments, first and second."""
    m = stored_as(E4M3)
    pairs = {
        "m E4M3, v fp32": (m, exact),
        "m fp32, sqrt(v) E4M4": (exact, root_of(stored_as(E4M4))),
        "E4M3, v E4M3": (m, m),
        "E4M3, v E5M2": (m, stored_as(E5M2)),
        "E4M3, sqrt(v) E4M3": (m, root_of(stored_as(E4M3))),
        "E4M3, sqrt(v) E5M2": (m, root_of(stored_as(E5M2))),
        "E4M3, sqrt(v) E4M4": (m, root_of(stored_as(E4M4))),
        "E4M3, sqrt(v) E4M4 rounded up": (m, root_of(stored_as(E4M4, "up"))),
        "E4M3, sqrt(v) E4M4 random": (m, root_of(stored_as(E4M4, "random"))),
        "E4M3 random, sqrt(v) E4M4 random": (stored_as(E4M3, "random"), root_of(stored_as(E4M4, "random"))),
        "COAT": (update_error.coat, update_error.coat),
    }
    stored = {name: update_error.Stored(numel, *pair, clamp=clamp) for name, pair in pairs.items()}
    return {"ours: E4M3, sqrt(v) E4M4, evenly spread": update_error.Ours(numel, clamp), **stored}


def formats_table(rows: int, seeds: Iterable[int]) -> list[Row]:
    """Update error and largest update of every arm in the middle family; mean, least and largest over seeds."""
    table: dict[str, Row] = {}
    for betas in update_error.BETAS:
        runs: dict[str, list[tuple[float, float]]] = {}
        for seed in seeds:
            for clamp in (True, False):
                gradients = update_error.Gradients(update_error.FAMILIES["middle"], rows, seed=seed)
                numel = rows * update_error.COLUMNS
                for name, got in update_error.simulate(gradients, arms(numel, clamp), betas).items():
                    runs.setdefault(name + ("" if clamp else "|free"), []).append(got)
        for name, got in runs.items():
            base, free = name.removesuffix("|free"), name.endswith("|free")
            errors = [error for error, _ in got]
            key = f"beta2 {betas[1]}" + (", no clamp" if free else "")
            row = table.setdefault(base, {"format": base})
            row[f"error, {key}"] = sum(errors) / len(errors)
            row[f"spread, {key}"] = max(errors) - min(errors)
            row[f"largest update, {key}"] = max(largest for _, largest in got)
    return list(table.values())


def sparse_table(rows: int) -> list[Row]:
    """As `formats_table` where a row has a gradient in one step of 20 only, as embeddings do; one seed."""
    table = []
    for betas in update_error.BETAS:
        for clamp in (True, False):
            gradients = update_error.Gradients(update_error.FAMILIES["middle"], rows, active=0.05)
            got = update_error.simulate(gradients, arms(rows * update_error.COLUMNS, clamp), betas)
            for name, (error, largest) in got.items():
                table.append({"format": name, "beta2": betas[1], "clamp": clamp, "error": error, "largest": largest})
    return table


def spread_table(rows: int, sigmas: Iterable[float]) -> list[Row]:
    """Update error against how much the scales within a group of 128 vary."""
    table = []
    for sigma in sigmas:
        row: Row = {"sigma of ln(scale) within a group": sigma}
        for betas in update_error.BETAS:
            numel = rows * update_error.COLUMNS
            chosen = {
                "ours": update_error.Ours(numel),
                "sqrt(v) E4M3": update_error.Stored(numel, stored_as(E4M3), root_of(stored_as(E4M3))),
                "COAT": update_error.Stored(numel, update_error.coat, update_error.coat),
            }
            gradients = update_error.Gradients((0.8, sigma / math.sqrt(2), sigma / math.sqrt(2)), rows)
            for name, (error, _) in update_error.simulate(gradients, chosen, betas).items():
                row[f"{name}, beta2 {betas[1]}"] = error
        row |= {
            f"ours / COAT, beta2 {b}": row[f"ours, beta2 {b}"] / row[f"COAT, beta2 {b}"] for _, b in update_error.BETAS
        }
        table.append(row)
    return table


def long_table(rows: int, steps: dict[float, int]) -> list[Row]:
    """Update error where v has become stationary, which takes several times `1 / (1 - beta2)` steps."""
    table, numel = [], rows * update_error.COLUMNS
    for beta2, count in steps.items():
        for family, sigmas in update_error.FAMILIES.items():
            chosen = {
                "ours": update_error.Ours(numel),
                "nearest": update_error.Stored(numel, stored_as(E4M3), root_of(stored_as(E4M4))),
                "sqrt(v) random": update_error.Stored(numel, stored_as(E4M3), root_of(stored_as(E4M4, "random"))),
                "m E4M3, v fp32": update_error.Stored(numel, stored_as(E4M3), exact),
                "COAT": update_error.Stored(numel, update_error.coat, update_error.coat),
            }
            got = update_error.simulate(update_error.Gradients(sigmas, rows), chosen, (0.9, beta2), count)
            row: Row = {"beta2": beta2, "steps": count, "family": family}
            table.append(row | {name: error for name, (error, _) in got.items()})
    return table


def smooth_table(rows: int) -> list[Row]:
    """Update error and gain (projection on the exact update) where gradients have no noise and shrink at many paces."""
    table = []
    for betas in update_error.BETAS:
        numel = rows * update_error.COLUMNS
        m, random_m = stored_as(E4M3), stored_as(E4M3, "random")
        chosen = {
            "ours": update_error.Ours(numel),
            "nearest": update_error.Stored(numel, m, root_of(stored_as(E4M4))),
            "m nearest, v random": update_error.Stored(numel, m, root_of(stored_as(E4M4, "random"))),
            "random": update_error.Stored(numel, random_m, root_of(stored_as(E4M4, "random"))),
            "COAT": update_error.Stored(numel, update_error.coat, update_error.coat),
        }
        got = update_error.simulate(update_error.Smooth(update_error.FAMILIES["middle"], rows), chosen, betas)
        table += [{"beta2": betas[1], "rounding": name, "error": error} for name, (error, _) in got.items()]
    return table


def rounded_scale(dtype: torch.dtype) -> Scale:
    return lambda amax, fmt_max, tiny=0.0: (amax / fmt_max).to(dtype).float()


STORAGE: dict[str, tuple[Scale, bool]] = {
    "ours": (update_error.GROUP_SCALE_INV, False),
    "ours, power-of-two scale": (update_error.power_of_two, False),
    "nearest, float32 scale": (update_error.GROUP_SCALE_INV, True),
    "nearest, fp16 scale": (rounded_scale(torch.float16), True),
    "nearest, bf16 scale": (rounded_scale(torch.bfloat16), True),
    "nearest, power-of-two scale": (update_error.power_of_two, True),
}
"""Format of the scale; whether moments are rounded to nearest."""


def stall_curves(beta2: float, before: int, after: int, numel: int, half: bool) -> list[Row]:
    """Median of sqrt(stored v) / sqrt(v) over the steps after gradients shrank tenfold: all, or every other one."""
    generator = torch.Generator().manual_seed(1)
    size = 1e-2 * torch.exp(0.8 * torch.randn(numel, generator=generator))
    shrinks = torch.arange(numel) % 2 == 0 if half else torch.ones(numel, dtype=torch.bool)
    factor = torch.where(shrinks, 0.1, 1.0)
    states = {name: update_error.Ours(numel) for name in STORAGE}
    v, curve = torch.zeros(numel, dtype=torch.float64), []
    for step in range(1, before + after + 1):
        grad = size * torch.randn(numel, generator=generator) * (1.0 if step <= before else factor)
        v = beta2 * v + (1 - beta2) * grad.double().square()
        for name, state in states.items():
            scale_of, nearest = STORAGE[name]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(moments, "group_scale_inv", scale_of)
                if nearest:
                    update_error.round_to_nearest(patch)
                state.update(grad, step, (0.9, beta2))
        if step >= before and (step - before) % max(1, after // 100) == 0:
            ratios = {name: (read_moments(state.shard)[1] / v.sqrt())[shrinks] for name, state in states.items()}
            row: Row = {"step after the drop": step - before}
            row |= {name: float(ratio.median()) for name, ratio in ratios.items()}
            row["ours, 1st percentile"] = float(ratios["ours"].quantile(0.01))
            row["ours, 99th percentile"] = float(ratios["ours"].quantile(0.99))
            curve.append(row)
    return curve


def walk_table(steps: int, numel: int) -> list[Row]:
    """Relative L2 error of a master's way under noisy updates, by how it is rounded."""
    table = []
    for lr in (1e-4, 1e-5, 1e-6):
        row: Row = {"lr": lr, "steps": steps}
        for fmt in (E4M11, BF16_8):
            row[f"{fmt.name}, ours"] = masters.walk(fmt, lr, steps=steps, numel=numel)
            row[f"{fmt.name}, independent"] = masters.walk(fmt, lr, True, steps, numel)
            row[f"{fmt.name}, nearest"] = masters.walk(replace(fmt, stochastic=False), lr, False, steps, numel)
        table.append(row | {"e4m19, nearest": masters.walk(E4M19, lr, steps=steps, numel=numel)})
    return table


def bound_table(steps: int) -> list[Row]:
    """R_t, how near to it stored moments come with and without the clamp, and saturations by prediction."""
    limits: dict[str, Callable[[int, tuple[float, float]], float]] = {
        "R_t": bound.bound_of,
        "1": lambda step, betas: 1.0,
        "none": lambda step, betas: 0.0,
    }
    table = []
    for betas in bound.BETAS:
        row: Row = {"betas": str(betas), "R_200": bound.bound_of(200, betas), "R_1e6": bound.bound_of(10**6, betas)}
        for clamp in (True, False):
            ratios = bound.largest_update_of_bound(bound.growing(betas), betas, 200, clamp)
            row[f"largest update / R_t, {'clamped' if clamp else 'free'}"] = float(ratios.max())
        for name, limit in limits.items():
            run = bound.train_with_predicted_scales(E4M11, betas, limit, steps)
            row[f"saturated, bound {name}"] = run.saturated
            row[f"amax / predicted, bound {name}"] = run.largest_of_prediction
            row["changes of scale"] = run.scale_changes if name == "R_t" else row["changes of scale"]
        table.append(row)
    spike = [
        bound.largest_update_of_bound(bound.one_spike_then_silence, (0.9, 0.95), 120, clamp) for clamp in (True, False)
    ]
    table[0]["spike: largest update / R_t, clamped"], table[0]["spike: largest update / R_t, free"] = (
        float(ratio.max()) for ratio in spike
    )
    return table


def bf16_travel(weight: Tensor, sign: Tensor, lr: float, steps: int = 100) -> Tensor:
    """As `masters.travel`: bf16 weights rounded to nearest, without any master."""
    master = start = weight.bfloat16()
    for _ in range(steps):
        master = (master.float() - lr * sign).bfloat16()
    return -(master.double() - start.double()) * sign / (lr * steps)


def split(fmt: Any) -> Callable[[Tensor, Tensor, float], Tensor]:
    return lambda weight, sign, lr: masters.travel(fmt, weight, sign, lr)


MASTERS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "e4m19": split(E4M19),
    "e4m11": split(E4M11),
    "bf16_8": split(BF16_8),
    "e4m19 stochastic": split(replace(E4M19, stochastic=True)),
    "e4m11 to nearest": split(replace(E4M11, stochastic=False)),
    "bf16_8 to nearest": split(replace(BF16_8, stochastic=False)),
    "e4m7 stochastic": split(masters.E4M7),
    "MS-AMP fp16": masters.ms_amp_travel,
    "bf16 to nearest": bf16_travel,
}


def travel_table(lrs: Iterable[float], numel: int) -> list[Row]:
    """Mean share of float32's way, its relative L2 error, and the share of weights that never moved."""
    table = []
    for sigma, mean in ((0.02, 0.0), (0.05, 0.0), (0.0, 1.0)):
        weight, sign = masters.weights_and_signs(sigma, mean, numel)
        for lr in lrs:
            for name, way in MASTERS.items():
                share = way(weight, sign, lr)
                kind = f"N(0, {sigma})" if sigma else "all 1.0"
                row: Row = {"weights": kind, "lr": lr, "master": name, "mean": float(share.mean())}
                row |= {"error": masters.travel_error(share), "frozen": float((share == 0).double().mean())}
                table.append(row)
    return table


def bytes_table() -> list[Row]:
    """Bytes per parameter that stay resident, gradient not counted."""
    scales = 2 * 4 / GROUP
    table = []
    for fmt in (E4M11, E4M19, FP32, BF16_8):
        compute = 1 if fmt is FP32 else 0  # the FP8 weight beside a float32 master; else it is the master's high part
        row: Row = {"master": fmt.name, "weight and master": fmt.num_bytes + compute, "m": 1, "v": 1, "scales": scales}
        table.append(row | {"sum": fmt.num_bytes + compute + 2 + scales})
    return table


def write_csv(path: Path, table: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in table)


def show(name: str, table: list[Row]) -> None:
    print(f"\n{name}")
    for row in table:
        print("  " + ", ".join(f"{k}: {v:.4g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/img")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    quick, start = args.quick, time.monotonic()
    stalls = {
        "0.95": (0.95, 300, 300, False),
        "0.999": (0.999, 3000, 4000, False),
        "0.999-half": (0.999, 3000, 4000, True),
    }
    drop = {name: (b, 30, 30, half) if quick else (b, x, y, half) for name, (b, x, y, half) in stalls.items()}
    sigmas = [0.5, 1.5] if quick else [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3]
    lrs = [1e-6, 1e-5] if quick else [1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3]
    tables = {
        "formats": formats_table(8 if quick else 128, [0] if quick else [0, 1, 2]),
        "sparse": sparse_table(8 if quick else 96),
        "spread": spread_table(8 if quick else 96, sigmas),
        "long": long_table(8 if quick else 16, {0.95: 50} if quick else {0.95: 2000, 0.99: 3000, 0.999: 8000}),
        "smooth": smooth_table(8 if quick else 96),
        **{
            f"stall-{name}": stall_curves(beta2, before, after, 1024 if quick else 4096, half)
            for name, (beta2, before, after, half) in drop.items()
        },
        "walk": walk_table(50 if quick else 2000, 1 << 13),
        "bound": bound_table(100 if quick else 2000),
        "travel": travel_table(lrs, 1024 if quick else 1 << 16),
        "bytes": bytes_table(),
    }
    args.images.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(args.images / f"numerics-{name}.csv", table)
        if name != "travel":
            show(name, table[-1:] if name.startswith("stall") else table)
    import matplotlib

    matplotlib.use("Agg")
    titles = {"0.95": "all shrink, β2 0.95", "0.999": "all shrink, β2 0.999", "0.999-half": "every other, β2 0.999"}
    curves = {title: tables[f"stall-{name}"] for name, title in titles.items()}
    plot_moments(tables["spread"], curves, list(STORAGE), args.images / "numerics-moments.png")
    plot_masters(tables["travel"], list(MASTERS), args.images / "numerics-masters.png")
    head = {"command": " ".join(["benchmarks/numerics.py", *sys.argv[1:]]), "device": "cpu", "torch": torch.__version__}
    head["seconds"] = f"{time.monotonic() - start:.0f}"
    stem = args.out / f"{datetime.date.today():%Y-%m-%d}-numerics.json"
    stem.write_text(json.dumps({**head, **tables}, indent=1) + "\n")
    print(f"\n{head['seconds']} s")


if __name__ == "__main__":
    main()
