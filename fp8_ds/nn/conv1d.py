"""transformers' Conv1D in FP8: the linear of GPT and GPT-2, whose weight is stored [I, O], input features first.

One scale for the whole weight does not mind how it lies, and a GEMM reads either layout: of a stored [I, O] grad_input
needs no transpose, and output needs one, where an nn.Linear has it the other way round. Scales of rows or blocks would
be those of input features, along which `output` contracts: layers with such recipes stay in bf16.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from fp8_ds.nn.linear import Fp8Linear, check_dtype, check_features, convert_back, convert_in_place
from fp8_ds.nn.recipe import Recipe

RECIPES = ("tensorwise", "delayed")
"""Those that a Conv1D can have."""


def conv1d_class() -> type[nn.Module] | None:
    """transformers' Conv1D; None where nobody has imported it, so that there is no such layer."""
    found: type[nn.Module] | None = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is exactly a Conv1D, or one in FP8."""
    return type(module) in (conv1d_class(), Fp8Conv1D)


class Fp8Conv1D(Fp8Linear):
    """A Conv1D computed in FP8: input and output as those of an nn.Linear; its weight, and the gradient, are [I, O]."""

    @classmethod
    def from_linear(cls, module: nn.Module, recipe: Recipe) -> Fp8Conv1D:
        """`module` itself, now in FP8: same object, same Parameters, hooks and state dict.

        Args:
            module: exactly a Conv1D.
            recipe: of its own, one of `RECIPES`; it reads the weight as it is stored from now on.
        """
        weight: Any = module.weight
        convert_in_place(module, cls)
        assert isinstance(module, Fp8Conv1D)
        module.in_features, module.out_features = getattr(weight, "ds_shape", weight.shape)
        module.fp8_recipe = recipe
        recipe.is_turned = True
        return module

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        check_features(input, self.in_features)
        check_dtype(input, self.weight)
        return self.computed(self.readable(input), bias)

    def revert(self) -> None:
        del self.fp8_recipe, self.in_features, self.out_features
        convert_back(self, conv1d_class())
