"""A mixture's experts, forward and backward: transformers' own in bf16, and those of fp8_ds; one table.

    python benchmarks/experts.py --out results      # one GPU, a minute
    python benchmarks/experts.py --dry --out results    # CPU, tiny

FP8 weights are made once, as an engine makes them once a step. Experts are chosen at random: all have about as many
tokens. Of transformers' ways the loop over experts is what it falls back to, and the grouped product what it takes on
a GPU where nothing else is said. Of ours both are measured: the loop is what GPUs before Hopper take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from results_io import dated_stem, heading
from timing import median_ms
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn import apply_plan, expert_products, make_plan
from fp8_ds.nn.layers import fp8_layers

STOCK = ("eager", "grouped_mm")
LOOP, ONE_LAUNCH = "fp8_ds, loop", "fp8_ds, one launch"
OURS = ((LOOP, "e5m2"), (ONE_LAUNCH, "e5m2"), (ONE_LAUNCH, "e4m3"))
"""Ways, and formats of gradients."""


@dataclass(frozen=True)
class Shape:
    """Of one layer.

    Args:
        top_k: experts that a token chooses.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int = 8192

    @property
    def flops(self) -> float:
        """Of forward and backward, with gradients of inputs and weights."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.hidden * self.intermediate


SHAPES = (
    Shape("Mixtral-8x7B", 8, 4096, 14336, 2),
    Shape("Qwen3-30B-A3B", 128, 2048, 768, 8),
)
TINY = (Shape("tiny", 4, 64, 96, 2, 48),)


def stock_experts(shape: Shape, implementation: str, device: str) -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_local_experts=shape.experts
    )
    config._experts_implementation = implementation
    with torch.device(device):
        experts = MixtralExperts(config).to(torch.bfloat16)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.02)
    return experts


def fp8_experts(shape: Shape, linear: dict[str, Any], device: str) -> Any:
    """With weights that are in FP8 before the first forward."""
    model = nn.ModuleDict({"experts": stock_experts(shape, "eager", device)})
    config = LinearConfig.model_validate(linear)
    apply_plan(model, make_plan(model, config), config, device)
    for layer in fp8_layers(model).values():
        held = layer.fp8_recipe.read_weight(layer.weight)
        layer.fp8_recipe.read_weight = lambda _, held=held: held  # type: ignore[method-assign, misc]
    return model["experts"]


class Arm(NamedTuple):
    """Experts of a layer, in one way. is_loop: ours one after another, though there are kernels for all at once."""

    name: str
    build: Callable[[], Any]
    is_loop: bool = False


def arms(shape: Shape, device: str) -> Iterator[Arm]:
    for implementation in STOCK:
        yield Arm(f"transformers, bf16, {implementation}", partial(stock_experts, shape, implementation, device))
    for way, grad_dtype in OURS:
        linear = {"recipe": "tensorwise", "grad_dtype": grad_dtype}
        yield Arm(f"{way}, {grad_dtype} gradients", partial(fp8_experts, shape, linear, device), way == LOOP)


def in_a_loop() -> AbstractContextManager[Any]:
    """Ours are computed one after another, as where there are no kernels for all at once."""
    return patch.object(expert_products.grouped, "can_run", lambda device: False)


def measure(shape: Shape, build: Callable[[], Any], device: str) -> dict[str, float]:
    experts = build()
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores, index = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.top_k)
    weights = scores.to(torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def forward() -> Any:
        return experts(x, index, weights)

    def both() -> None:
        experts.zero_grad(set_to_none=True)
        x.grad = None
        forward().backward(grad)

    if device == "cpu":
        both()
        return {"forward_ms": 0.0, "both_ms": 0.0, "tflops": 0.0, "kept_gib": 0.0}
    both()
    before = torch.cuda.memory_allocated()
    output = forward()
    kept = torch.cuda.memory_allocated() - before - output.nbytes
    del output
    forward_ms, both_ms = median_ms(forward), median_ms(both)
    rate = shape.flops / both_ms / 1e9
    return {"forward_ms": forward_ms, "both_ms": both_ms, "tflops": rate, "kept_gib": kept / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny, without times")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    device = "cpu" if args.dry else "cuda"
    rows = []
    table = ["| layer | experts | forward, ms | and backward, ms | TFLOP/s | keeps, GiB |", "|---" * 6 + "|"]
    for shape in TINY if args.dry else SHAPES:
        for arm in arms(shape, device):
            try:
                with in_a_loop() if arm.is_loop else nullcontext():
                    found = measure(shape, arm.build, device)
            except (RuntimeError, ValueError) as error:  # a version without that implementation
                table.append(f"| {shape.name} | {arm.name} | {str(error).splitlines()[0][:100]} | | | |")
                continue
            rows.append({**asdict(shape), "arm": arm.name, **found})
            ms = f"{found['forward_ms']:.2f} | {found['both_ms']:.2f}"
            table.append(f"| {shape.name} | {arm.name} | {ms} | {found['tflops']:.2f} | {found['kept_gib']:.2f} |")
            print(table[-1], flush=True)
    stem = dated_stem(args.out, "experts")
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(heading(stem.name) + "\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
