"""Fp8Context: everything that the engine hands to the ZeRO mix-ins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from fp8_ds.comm.counter import ByteCounter
from fp8_ds.config import Fp8Config
from fp8_ds.nn.convert import Plan
from fp8_ds.scaling.delayed import AmaxHistory
from fp8_ds.scaling.granularity import OF_RECIPE, TENSOR, Granularity
from fp8_ds.zero.release import ReleaseUpdater

if TYPE_CHECKING:
    from fp8_ds.engine.precision import LayerPrecision


@dataclass
class Fp8Context:
    """Configuration and shared objects of one engine.

    A weight counts as trainable if it was so at the start: one that a user freezes later keeps its master.

    Args:
        config: the checked "fp8" block.
        plan: which linears are FP8.
        weights: name -> Parameter of every converted weight, in module order.
        history: amax histories of the recipe `delayed`, else None.
        counter: counts the bytes that our gathers move.
        check_overflow: `bf16.check_grad_overflow`.
        release: updates weights during the backward; None without gradient release.
        precision: which layers compute in bf16; None until the engine is built.
    """

    config: Fp8Config
    plan: Plan
    weights: dict[str, nn.Parameter]
    history: AmaxHistory | None = None
    counter: ByteCounter = field(default_factory=ByteCounter)
    check_overflow: bool = True
    release: ReleaseUpdater | None = None
    precision: LayerPrecision | None = None

    def __post_init__(self) -> None:
        self._trainable = frozenset(name for name, p in self.weights.items() if p.requires_grad)

    @property
    def granularity(self) -> Granularity:
        """Elements of a weight that share a scale. Split masters have one scale a weight, whatever the recipe."""
        return TENSOR if self.config.optimizer.states == "fp8" else OF_RECIPE[self.config.linear.recipe]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name in self._trainable}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name not in self._trainable}
