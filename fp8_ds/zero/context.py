"""Fp8Context: what the engine hands to the ZeRO mix-ins."""

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
    """Args:
    config: the checked "fp8" block.
    plan: which linears are FP8.
    weights: name -> Parameter of every converted weight, in module order.
    history: amax histories of the recipe `delayed`, else None.
    counter: bytes our gathers moved.
    check_overflow: `bf16.check_grad_overflow`.
    release: updates during the backward, None without.
    precision: which layers compute in bf16; None until the engine is built.

    What is trainable here was so at the start: weights that a user freezes in the middle of a run keep their masters.
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
        """Which elements of a weight share a scale. Split masters have one scale a weight, whatever the recipe."""
        return TENSOR if self.config.optimizer.states == "fp8" else OF_RECIPE[self.config.linear.recipe]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name in self._trainable}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name not in self._trainable}
