"""How a linear enters FP8: one object per layer, chosen when the layer is converted.

Both recipes are, with T tokens,

    output      = gemm(q_e4m3(x),           weight_fp8)
    grad_input  = gemm(q_grad(grad_output), weight_fp8.T)
    grad_weight = gemm(q_grad(grad_output).T, q_e4m3(x).T)

and differ in where the scales of x and grad_output come from. The weight's always comes from its payload.
"""

from __future__ import annotations

from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.formats import BY_NAME, E4M3, Float8Format
from fp8_ds.ops.gemm import GemmBackend
from fp8_ds.ops.quantize import quantize_delayed, quantize_tensorwise, record_amax
from fp8_ds.scaling.delayed import AmaxHistory, AmaxSlot


class TensorwiseRecipe:
    """Scales from the tensor at hand: one amax pass before each cast, nothing remembered."""

    name = "tensorwise"

    def __init__(self, linear_config: LinearConfig) -> None:
        self.grad_format: Float8Format = BY_NAME[linear_config.grad_dtype]
        self.backend: GemmBackend = linear_config.backend

    def quantize_input(self, x: Tensor, *, record: bool) -> tuple[Tensor, Tensor]:
        """(x_fp8 in E4M3, scale_inv); `record` tells whether this is a training forward."""
        return quantize_tensorwise(x, E4M3)

    def quantize_grad_output(self, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """(grad_fp8 in the configured gradient format, scale_inv)."""
        return quantize_tensorwise(grad_output, self.grad_format)


class DelayedRecipe(TensorwiseRecipe):
    """Scales from an AmaxHistory, this step's amaxes maximumed into it; until its first update as tensorwise.

    A slot that saw no tensor before the first update has scale 1 until the update after its first use.

    Args:
        linear_config: of the layer.
        history: shared by all layers.
        slot_x: the layer's input in `history`.
        slot_grad: its grad_output.
    """

    name = "delayed"

    def __init__(self, linear_config: LinearConfig, history: AmaxHistory, slot_x: int, slot_grad: int) -> None:
        super().__init__(linear_config)
        self.history = history
        self.slot_x = history.slot(slot_x)
        self.slot_grad = history.slot(slot_grad)

    def _quantize(self, x: Tensor, slot: AmaxSlot, fmt: Float8Format, record: bool) -> tuple[Tensor, Tensor]:
        if self.history.ready:
            return quantize_delayed(x, slot.scale, slot.scale_inv, slot.amax_local, fmt, record=record)
        if record:
            record_amax(x, slot.amax_local)
        return quantize_tensorwise(x, fmt)

    def quantize_input(self, x: Tensor, *, record: bool) -> tuple[Tensor, Tensor]:
        return self._quantize(x, self.slot_x, E4M3, record)

    def quantize_grad_output(self, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return self._quantize(grad_output, self.slot_grad, self.grad_format, True)
