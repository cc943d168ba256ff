"""Observed recipes: they count what they quantise while a step is sampled; at all other times nothing of this is there.

An observed recipe is the same object in a subclass: no test of a switch anywhere, and in compiled code another graph,
made in the first sampled step and found again in later ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.monitor.statistics import KINDS, StatisticsTable
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe
from fp8_ds.numerics.formats import E4M3, Float8Format
from fp8_ds.ops.observe import observe_codes, observe_hp


class ObservedRecipe(Recipe):
    """Mix-in before a recipe's class. GEMMs count every operand, however it was quantised; zeros are counted before.

    Attributes:
        counts: of input, weight and grad_output, see StatisticsTable.slot.
        model: forwards in its evaluation mode are not counted; None: all are.
    """

    counts: tuple[Tensor, Tensor, Tensor]
    model: nn.Module | None

    @property
    def is_in_training(self) -> bool:
        return self.model is None or self.model.training

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        x_fp8 = super().quantize_input(x, needs_columns=needs_columns, record=record)
        if self.is_in_training:
            _observe(x, x_fp8, E4M3, self.counts[0])
        return x_fp8

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        adopted = super().adopt(x, x_fp8, record=record)
        if self.is_in_training:
            _observe(x, adopted, E4M3, self.counts[0])
        return adopted

    def quantize_grad_output(
        self, grad_TO: Tensor, weight: Fp8Weight | None, kept: tuple[Tensor, ...] | None
    ) -> Quantized:
        grad_fp8 = super().quantize_grad_output(grad_TO, weight, kept)  # type: ignore[safe-super]
        _observe(grad_TO, grad_fp8, self.grad_format, self.counts[2])
        return grad_fp8

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        self.count_whole(x_fp8, weight)
        return super().output(x_fp8, weight, dtype)

    @property
    def parts(self) -> Any:
        return super()

    def count_whole(self, x_fp8: Quantized, weight: Fp8Weight) -> None:
        assert x_fp8.rows is not None
        if self.is_in_training:
            observe_codes(x_fp8.rows, x_fp8.scale_inv, self.counts[0], can_saturate=x_fp8.slot is not None)
            codes = weight.data if weight.data.dim() == 2 else weight.data.flatten(0, 1)  # of experts
            # Bounded by its master's amax.
            observe_codes(codes, weight.scale_inv, self.counts[1], can_saturate=False)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        self.grad_rows(grad_fp8)
        return super().grad_input(grad_fp8, weight, dtype)  # type: ignore[safe-super]

    def grad_rows(self, grad_fp8: Quantized) -> Tensor:
        rows = super().grad_rows(grad_fp8)
        observe_codes(rows, grad_fp8.scale_inv, self.counts[2], can_saturate=grad_fp8.slot is not None)
        return rows


def _observe(x: Tensor, x_fp8: Quantized, fmt: Float8Format, counts: Tensor) -> None:
    """Observe a tensor before its cast; only a scale from elsewhere, an amax history's, can be too large for it."""
    limits = () if x_fp8.slot is None else (x_fp8.scale_inv, fmt.max)
    observe_hp(x, counts, *limits)


@functools.cache
def _observed_class(stock: Any) -> Any:
    return type(f"Observed{stock.__name__}", (ObservedRecipe, stock), {"__module__": __name__})


class Observers:
    """FP8 linears, watched between `attach` and `detach`.

    Args:
        linears: name -> what has an `fp8_recipe`; of a whole model `fp8_layers(model)`.
        table: with a row for each of these names, in their order.
        model: one that is evaluated between steps. Its forwards in evaluation mode are not counted, unless that is the
            mode it trains in, as one from `from_pretrained` does until `train()` is called. None: all are.
    """

    def __init__(self, linears: Mapping[str, Any], table: StatisticsTable, model: nn.Module | None = None) -> None:
        assert tuple(linears) == table.names
        self._linears = linears
        self._model = model
        self._counts = [tuple(table.slot(i, kind) for kind in KINDS) for i in range(len(table.names))]
        self._attached: list[tuple[Any, type[Recipe]]] = []

    def attach(self, *, after_step: bool = True) -> None:
        """Count what layers that are in FP8 now quantise, from here on.

        Args:
            after_step: one has just ended, so that the model is in the mode that it trains in.
        """
        assert not self._attached
        trains_in_training_mode = after_step and self._model is not None and self._model.training
        for linear, counts in zip(self._linears.values(), self._counts, strict=True):
            recipe: Any = linear.fp8_recipe
            if not recipe.is_fp8:
                continue
            recipe.counts, recipe.model = counts, self._model if trains_in_training_mode else None
            self._attached.append((recipe, recipe.__class__))
            recipe.__class__ = _observed_class(recipe.__class__)

    def detach(self) -> None:
        """Give recipes their own classes again."""
        for recipe, stock in self._attached:
            recipe.__class__ = stock
            del recipe.counts, recipe.model
        self._attached.clear()
