"""The optimizer step alone, ours beside its rivals, on the same 2.0 B parameters. Writes dated result files.

    python benchmarks/optimizer_step.py                                    # one H200: about 25 s an arm
    python benchmarks/optimizer_step.py --arms "ours e4m11" --layers 1 --hidden 128 --vocab 512     # dry run on CPU

One process per arm, so that no arm inherits another's memory, and a copy-rate reference in each of them. A rival whose
package is missing, or that fails, gets a row that says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import error_of, run_logged
from results_io import dated_stem, device_name, heading
from step_profile import time_steps
from timing import copy_rate
from torch import nn

HERE = Path(__file__).parent
BETAS, EPS, WEIGHT_DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-4
HEAD_DIM, NUM_WARM_STEPS = 128, 3
LINEAR = "linear"
"""Kind of a parameter that the engine would store in FP8; embedding, head and norms are "other"."""


@dataclass(frozen=True)
class Arm:
    """One optimizer.

    Args:
        package: that must be importable.
        build: the named parameters by kind -> optimizer, with gradients set.
        linear_bytes, other_bytes: that a step must read and write per parameter of either kind, scales included.
    """

    package: str
    build: Callable[[dict[str, list[nn.Parameter]]], Any]
    linear_bytes: float
    other_bytes: float

    @property
    def param_dtype(self) -> torch.dtype:
        return torch.float32 if self.build is torch_fused else torch.bfloat16


def llama_parameters(layers: int, hidden: int, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(kind, shape) of every parameter; 8 layers, 4096 and 32000 are 2.0 B with Llama-3-8B's shapes."""
    kv, ffn = max(HEAD_DIM, hidden // 4), hidden * 7 // 2
    yield "other", (vocab, hidden)
    for _ in range(layers):
        for rows, columns in ((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)):
            yield LINEAR, (rows, columns)
        for rows, columns in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
            yield LINEAR, (rows, columns)
        yield "other", (hidden,)
        yield "other", (hidden,)
    yield "other", (hidden,)
    yield "other", (vocab, hidden)


def make_parameters(args: argparse.Namespace, dtype: torch.dtype, device: str) -> dict[str, list[nn.Parameter]]:
    generator = torch.Generator(device).manual_seed(0)
    by_kind: dict[str, list[nn.Parameter]] = {LINEAR: [], "other": []}
    for kind, shape in llama_parameters(args.layers, args.hidden, args.vocab):
        value = torch.empty(shape, dtype=dtype, device=device)
        by_kind[kind].append(nn.Parameter(value.normal_(0, 0.02, generator=generator)))
    return by_kind


def _all(params: dict[str, list[nn.Parameter]]) -> list[nn.Parameter]:
    return [*params[LINEAR], *params["other"]]


def set_grads(params: dict[str, list[nn.Parameter]], dtype: torch.dtype, attribute: str = "grad") -> None:
    """Random gradients, a different size for each parameter (scales that all fit would flatter coarse formats)."""
    flat = _all(params)
    generator = torch.Generator(flat[0].device).manual_seed(1)
    for number, p in enumerate(flat):
        grad = torch.empty(p.shape, dtype=dtype, device=p.device)
        setattr(p, attribute, grad.normal_(0, 10.0 ** (-2 - number % 4), generator=generator))


HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
Build = Callable[[dict[str, list[nn.Parameter]]], Any]


def torch_fused(params: dict[str, list[nn.Parameter]]) -> Any:
    set_grads(params, torch.float32)
    return torch.optim.AdamW(_all(params), **HYPER, fused=True)


def rival(module: str, name: str, grad_dtype: torch.dtype = torch.bfloat16, **options: Any) -> Build:
    """Of a package. With "use_decoupled_grad" gradients lie where Megatron-LM's precision-aware optimizer has them."""

    def build(params: dict[str, list[nn.Parameter]]) -> Any:
        set_grads(params, grad_dtype, "decoupled_grad" if options.get("use_decoupled_grad") else "grad")
        return getattr(importlib.import_module(module), name)(_all(params), **HYPER, **options)

    return build


def torchao(name: str) -> Build:
    return rival("torchao.optim", name, bf16_stochastic_round=True)


def transformer_engine(grad_dtype: torch.dtype) -> Build:
    """float32 gradients are what Megatron-LM's precision-aware optimizer hands to it."""
    moments = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    separate = grad_dtype != torch.bfloat16
    module = "transformer_engine.pytorch.optimizers"
    return rival(module, "FusedAdam", grad_dtype, master_weights=True, use_decoupled_grad=separate, **moments)


def ours(master: str, check_finite: bool = False) -> Build:
    """No rival looks for NaN in gradients before its step; with `check_finite` ours reads them once more and does."""

    def build(params: dict[str, list[nn.Parameter]]) -> Any:
        import fp8_ds

        groups = [{"params": params[LINEAR], "master": master}, {"params": params["other"], "master": "bf16_8"}]
        optimizer = fp8_ds.Fp8AdamW(groups, **HYPER, check_finite=check_finite)
        set_grads(params, torch.bfloat16)
        return optimizer

    return build


GROUPS = 4 * 4 / 128
"""Bytes per parameter of two float32 scales a group of 128, read and written."""
EIGHT_BIT = 10 + GROUPS / 2
"""bf16 weights without a master, one-byte moments in blocks of 256."""
ARMS = {
    "torch fused AdamW fp32": Arm("torch", torch_fused, 28, 28),
    "torchao AdamWFp8": Arm("torchao", torchao("AdamWFp8"), EIGHT_BIT, EIGHT_BIT),
    "torchao AdamW8bit": Arm("torchao", torchao("AdamW8bit"), EIGHT_BIT, EIGHT_BIT),
    "bitsandbytes AdamW8bit": Arm("bitsandbytes", rival("bitsandbytes.optim", "AdamW8bit"), EIGHT_BIT, EIGHT_BIT),
    "FlashAdamW": Arm("flashoptim", rival("flashoptim", "FlashAdamW"), 12 + 8 / 32, 12 + 8 / 32),
    "TE FusedAdam FP8 m, v": Arm("transformer_engine", transformer_engine(torch.float32), 18, 18),
    "TE FusedAdam FP8 m, v, bf16 grads": Arm("transformer_engine", transformer_engine(torch.bfloat16), 16, 16),
    "ours e4m11": Arm("fp8_ds", ours("e4m11"), 10 + GROUPS, 12 + GROUPS),
    "ours e4m19": Arm("fp8_ds", ours("e4m19"), 12 + GROUPS, 12 + GROUPS),
    "ours fp32 master": Arm("fp8_ds", ours("fp32"), 16 + GROUPS, 12 + GROUPS),
    "ours e4m11, NaN check": Arm("fp8_ds", ours("e4m11", check_finite=True), 12 + GROUPS, 14 + GROUPS),
}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm, in this process."""
    arm = ARMS[name]
    if importlib.util.find_spec(arm.package) is None:
        return {"arm": name, "error": f"MISSING: package {arm.package} is not installed"}
    from fp8_ds.host import uses_cuda

    on_cuda = uses_cuda()
    device = "cuda" if on_cuda else "cpu"
    rate = copy_rate() / 1e9 if on_cuda else math.nan
    if on_cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    params = make_parameters(args, arm.param_dtype, device)
    count = {kind: sum(p.numel() for p in some) for kind, some in params.items()}
    total = sum(count.values())
    optimizer = arm.build(params)
    first = _fingerprint(params[LINEAR][0])
    for _ in range(NUM_WARM_STEPS):
        optimizer.step()
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ms = time_steps(lambda _: optimizer.step(), args.steps, on_cuda)["device_ms"]
    memory = {}
    if on_cuda:
        memory["resident_bytes_per_param"] = round((torch.cuda.memory_allocated() - before) / total, 4)
        memory["peak_bytes_per_param"] = round((torch.cuda.max_memory_allocated() - before) / total, 4)
    moved = count[LINEAR] * arm.linear_bytes + count["other"] * arm.other_bytes
    last = _fingerprint(params[LINEAR][0])
    return {
        "arm": name,
        "version": _version(arm.package),
        "parameters": total,
        "ms": ms,
        **memory,
        "must_move_bytes_per_param": round(moved / total, 3),
        "gb_per_s": round(moved / ms / 1e6, 1),
        "copy_gb_per_s": round(rate, 1),
        "moved_weights": first != last,
        "finite": math.isfinite(last),
        "device": device_name(),
        "torch": torch.__version__,
    }


def _fingerprint(weight: nn.Parameter) -> float:
    """A number that changes when the weight does; an FP8 one is de-quantised by this."""
    return weight.detach().float().square().mean().item()


def _version(package: str) -> str:
    names = {"transformer_engine": "transformer-engine", "fp8_ds": "fp8-ds"}
    try:
        return importlib.metadata.version(names.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def run_arm(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm in a process of its own; what went wrong under "error"."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
    command += [f"--{key}={getattr(args, key)}" for key in ("layers", "hidden", "vocab", "steps")]
    code, output, _ = run_logged(name, command, args.arm_timeout, None)
    found = [line for line in output.splitlines() if line.startswith('{"arm"')]
    if code or not found:
        return {"arm": name, "error": error_of(code, output, args.arm_timeout)}
    result: dict[str, Any] = json.loads(found[-1])
    return result


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| optimizer | ms | resident B/param | peak B/param | must move B/param | GB/s | of copy rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if "error" in r:
            reason = r["error"].splitlines()[0][:110].replace("|", "/")
            lines.append(f"| {r['arm']} | **NOT MEASURED: {reason}** | | | | | |")
            continue
        resident, peak = (r.get(f"{key}_bytes_per_param", float("nan")) for key in ("resident", "peak"))
        share = r["gb_per_s"] / r["copy_gb_per_s"]
        note = "" if r["moved_weights"] and r["finite"] else ", **weights did not move, or are not finite**"
        lines.append(
            f"| {r['arm']}{note} | {r['ms']:.2f} | {resident:.3f} | {peak:.3f} "
            f"| {r['must_move_bytes_per_param']:.2f} | {r['gb_per_s']:,.0f} | {share:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arm-timeout", type=float, default=120)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--worker", choices=list(ARMS), help="measure this arm in this process, print one JSON line")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, args)))
        return
    stem = dated_stem(args.out, "optimizer-step")
    results = []
    with stem.with_suffix(".jsonl").open("w") as lines:
        for name in args.arms:
            results.append(run_arm(name, args))
            print(json.dumps(results[-1]), file=lines, flush=True)
            print(json.dumps(results[-1]), flush=True)
    versions = ", ".join(f"{r['arm']}: {r['version']}" for r in results if "version" in r)
    text = heading(stem.name) + f"Versions: {versions}\n\n{table(results)}\n"
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
