"""The FP8 layers of a converted model (linears and weights of experts), and which linears are large enough to gain."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn

from fp8_ds.nn.experts import ExpertsWeight, Fp8Experts
from fp8_ds.nn.linear import Fp8Linear

Fp8Layer: TypeAlias = Fp8Linear | ExpertsWeight
MIN_NUMEL = 1 << 22
"""Elements of the smallest weight that gains.

On an H200, with 8,192 tokens, bf16's time over FP8's is 1.01 to 1.26 for weights of 1024 x 4096 and 2048 x 2048, by the
recipe (`tensorwise`: 1.09 and 1.18), and 0.72 to 1.04 for those of 768 x 3072. Measured was one linear, forward and
backward, on the device; source: benchmarks/results/2026-11-23-layer-table.md.
"""


def fp8_layers(model: nn.Module) -> dict[str, Fp8Layer]:
    """Return FP8 layers by plan name, in module order: linears by module name, experts' weights by parameter name."""
    found: dict[str, Fp8Layer] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            found[fqn] = module
        elif isinstance(module, Fp8Experts):
            prefix = f"{fqn}." if fqn else ""
            found.update((prefix + name, ExpertsWeight(module, name)) for name in module.fp8_recipes)
    return found


def fp8_pays(out_features: int, in_features: int) -> bool:
    """Whether a linear of this size, on one rank, takes less time in FP8 than in bf16, casts and transposes included.

    A rule of thumb: fewer tokens than 8,192 move the tie to larger weights, a fused producer or a shared input to
    smaller ones.
    """
    return out_features * in_features >= MIN_NUMEL
