"""The transformer layers of a model, to be found again when it trains."""

from __future__ import annotations

import weakref
from typing import Any

from megatron_patches.recipes import Fp8Settings


class LayerRegistry:
    """Layers that were entered, and the settings of their linears.

    Attributes:
        fp8: None: linears are Megatron's.
    """

    def __init__(self) -> None:
        self.fp8: Fp8Settings | None = None
        self._layers: list[weakref.ref[Any]] = []

    def add(self, layer: Any) -> None:
        self._layers.append(weakref.ref(layer))

    def layers(self) -> list[Any]:
        """That are alive, in the order they were built in."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def __deepcopy__(self, memo: Any) -> LayerRegistry:
        return self  # specs are copied
