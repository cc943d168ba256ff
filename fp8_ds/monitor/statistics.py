"""Statistics of FP8 tensors by layer: counted on the device while a step is sampled, read on the host one later.

Definitions, of all elements that were quantised in a sampled step, on all ranks of the group:

- amax: largest magnitude before the cast; where only FP8 was there (a fused producer's), that of the codes.
- scale: multiplies to enter FP8. Where rows or blocks have scales of their own, the smallest of them.
- saturation: share of elements beyond the format's largest value times scale_inv, or NaN. Only a scale from elsewhere
  than the tensor itself (recipe delayed) lets that happen; of a fused producer's output, whose values before the cast
  do not exist, those at the largest code are counted, some too many.
- underflow: share of elements that became zero or subnormal, of those that were not zero before. Elements that were
  exactly zero count in neither number where the high-precision tensor was there to see them (else they do count).

A tensor with an infinity or NaN has no scale of its own: then scale and both shares are NaN. With a scale from
elsewhere it has all of them, and its infinities and NaN are saturated.

While a step is sampled, recipes are the same objects in an observing subclass; at all other times nothing of this is
there: no test of a switch, and in compiled code another graph, made in the first sampled step and found again later.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8_ds.comm.host_copy import HostCopy
from fp8_ds.nn.linear.recipe import Fp8Weight, Quantized, Recipe
from fp8_ds.numerics.formats import E4M3, Float8Format
from fp8_ds.numerics.scale import in_own_storage
from fp8_ds.ops.observe import MAXIMA, new_counts, observe_codes, observe_hp

Kind = Literal["input", "weight", "grad_output"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The tensors of a linear that enter FP8."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor, see the module's definitions; shares are in [0, 1], or NaN.

    Args:
        num: elements counted; 0: the tensor did not occur, and the rest says nothing.
    """

    amax: float
    scale: float
    saturation: float
    underflow: float
    num: int


LayerStatistics = dict[str, dict[Kind, TensorStatistics]]
"""By layer and kind; kinds that did not occur are missing."""


def from_counts(counts: Tensor) -> TensorStatistics:
    """Return the statistics of counts, float64 [NUM_COUNTS] on the host."""
    amax_codes, scale_inv, num, saturated, small, zeros, amax_hp = counts.tolist()[:7]
    num_nonzero = max(num - zeros, 0.0)
    saturation = saturated / num if num else 0.0
    underflow = max(small - zeros, 0.0) / num_nonzero if num_nonzero else 0.0
    has_scale = math.isfinite(scale_inv)
    return TensorStatistics(
        amax=amax_hp or amax_codes,
        scale=1.0 / scale_inv if has_scale and scale_inv > 0 else math.nan,
        saturation=saturation if has_scale else math.nan,
        underflow=underflow if has_scale else math.nan,
        num=int(num),
    )


class StatisticsTable:
    """Counts of all layers in one device tensor, and the copy of the last sampled step on its way to the host.

    Args:
        names: of the layers.
        device: where they compute.
        group: counts are added up over its ranks; None: this rank's.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str, group: Any = None) -> None:
        self.names = tuple(names)
        self.group = group
        self._counts = new_counts(len(self.names), len(KINDS), device=device)
        self._maxima = torch.tensor(MAXIMA, device=device)
        self._host = HostCopy(self._counts)

    def slot(self, index: int, kind: Kind) -> Tensor:
        """Return float64 [NUM_COUNTS], which `observe_codes` counts layer `index` into, for the life of this object."""
        return in_own_storage(self._counts[index, KINDS.index(kind)])  # as AmaxHistory.slot

    @torch.no_grad()
    def send(self) -> None:
        """Start the counts on their way to the host, and zero them. Collective over the group; never waits.

        Counts that were sent before and not received are gone.
        """
        if self.group is not None and dist.get_world_size(self.group) > 1:
            maxima = self._counts.index_select(-1, self._maxima)
            maxima.nan_to_num_(nan=math.inf, posinf=math.inf)  # backends differ in the maximum of a NaN and a number
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
            dist.all_reduce(self._counts, group=self.group)
            self._counts.index_copy_(-1, self._maxima, maxima)
        self._host.send(self._counts)
        self._counts.zero_()

    def discard(self) -> None:
        """Zero the counts, so that nobody gets them."""
        self._counts.zero_()

    def receive(self) -> LayerStatistics:
        """Return what was last sent. Wait for that copy, which is long done an interval later."""
        found: LayerStatistics = {}
        for name, row in zip(self.names, self._host.read(), strict=True):
            of_layer = {kind: from_counts(counts) for kind, counts in zip(KINDS, row, strict=True)}
            found[name] = {kind: one for kind, one in of_layer.items() if one.num}
        return found


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
        self.observe_operands(x_fp8, weight)
        return super().output(x_fp8, weight, dtype)

    @property
    def unobserved(self) -> Any:
        return super()

    def observe_operands(self, x_fp8: Quantized, weight: Fp8Weight) -> None:
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
def _observed_class(original: Any) -> Any:
    return type(f"Observed{original.__name__}", (ObservedRecipe, original), {"__module__": __name__})


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
        for recipe, original in self._attached:
            recipe.__class__ = original
            del recipe.counts, recipe.model
        self._attached.clear()
