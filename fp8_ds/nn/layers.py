"""All that is in FP8 in a converted model: linears, and weights of experts, each with a recipe and a weight."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn

from fp8_ds.nn.experts import ExpertsWeight, Fp8Experts
from fp8_ds.nn.linear import Fp8Linear

Fp8Layer: TypeAlias = Fp8Linear | ExpertsWeight


def fp8_layers(model: nn.Module) -> dict[str, Fp8Layer]:
    """By their names in the plan, in module order: a linear's is its module's, that of experts their parameter's."""
    found: dict[str, Fp8Layer] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            found[fqn] = module
        elif isinstance(module, Fp8Experts):
            prefix = f"{fqn}." if fqn else ""
            found.update((prefix + name, ExpertsWeight(module, name)) for name in module.fp8_recipes)
    return found
