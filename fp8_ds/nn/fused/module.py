"""Fused producers: their readers, their recipes, and how a module becomes one.

A producer computes what FP8 linears read. A fused one hands them its output quantised, made in the pass that computes
it, beside the bf16 tensor for any other reader; for backward it keeps only its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import Quantized, Recipe
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops._producer import Fp8Output, Scaling
from fp8_ds.ops.blockwise import dequantize_groupwise, quantize_groupwise

Nonlinear = Literal["bf16", "fp8"]

FORMAT = E4M3  # of activations


@dataclass(frozen=True)
class Producer:
    """Readers of a fused module's output, and the form in which it keeps its inputs.

    Args:
        readers: at least one. Those that are Fp8Linears, and not plain, when the module runs share one recipe kind.
        nonlinear: "bf16": inputs are kept as they are; "fp8": in E4M3 with a power-of-two scale per 128 in a row.
    """

    readers: tuple[nn.Linear, ...]
    nonlinear: Nonlinear

    def recipe(self) -> Recipe | None:
        """Return the recipe of the first reader that is an Fp8Linear, and not in bf16 for good; None: the module runs
        as its own class does."""
        recipes = (linear.fp8_recipe for linear in self.readers if isinstance(linear, Fp8Linear))
        return next((recipe for recipe in recipes if not recipe.is_plain), None)


def deliver(output: Fp8Output, recipe: Recipe, scaling: Scaling | None, shape: torch.Size, record: bool) -> Tensor:
    """Return the bf16 output in `shape`, which its readers will find quantised.

    Args:
        output: from an op that was given `scaling` (any one for None) and `with_hp`.
        recipe: a reader's.
        scaling: from its `producer_scaling`; None: readers quantise for themselves.
        shape: of the result.
        record: whether this is a training forward.
    """
    assert output.hp is not None
    # Not a view: what a custom autograd function returns as a view cannot be written in place.
    hp: Tensor = torch.ops.aten._unsafe_view.default(output.hp, shape)
    if scaling is not None:
        slot = scaling if isinstance(scaling, AmaxSlot) else None
        recipe.offer(hp, Quantized(output.x_fp8, None, output.scale_inv, slot=slot), record=record)
    return hp


def as_rows(x: Tensor) -> Tensor:
    """Return [..., C] as [T, C], rows without gaps."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def keep(x: Tensor, nonlinear: Nonlinear) -> tuple[Tensor, ...]:
    """Return an input as it is saved for backward: itself, or codes and scales."""
    return quantize_groupwise(as_rows(x)) if nonlinear == "fp8" else (x,)


def recover(kept: Sequence[Tensor]) -> Tensor:
    """Return the input that `keep` has saved, as bf16 [T, C]."""
    return as_rows(kept[0]) if len(kept) == 1 else dequantize_groupwise(*kept)


class FusedModule(nn.Module):
    """Mix-in before the class of a fused module, which keeps its Parameters, hooks and state dict.

    Attributes:
        fp8_parts: what the search has found of the class's forward.
    """

    fp8_producer: Producer
    fp8_parts: Any

    @classmethod
    def fuse(cls, module: nn.Module, parts: Any, producer: Producer) -> None:
        """Fuse `module` in place: the same object."""
        module.__class__ = fused_class(cls, type(module))
        assert isinstance(module, FusedModule)
        module.fp8_parts, module.fp8_producer = parts, producer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, type(self).__bases__, *super().__reduce_ex__(protocol)[2:]

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), f"fused, kept={self.fp8_producer.nonlinear}"]))


fused_class: Callable[[Any, Any], Any] = functools.cache(
    lambda mixin, cls: type(f"Fp8{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__})
)
"""The subclass of a FusedModule and the class of a module, the same one each time."""


def _new(mixin: type[FusedModule], cls: type[nn.Module]) -> FusedModule:
    """Return an empty instance, for copies and pickles."""
    fused: type[FusedModule] = fused_class(mixin, cls)
    return fused.__new__(fused)


def bf16_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the one positional bf16 tensor that a module was called with; None if it was called otherwise."""
    is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == torch.bfloat16
    return args[0] if is_plain else None
