"""How a linear enters FP8: one object per layer, chosen when the layer is converted.

Both recipes are, with T tokens,

    output      = gemm(q_e4m3(x),           weight_fp8)
    grad_input  = gemm(q_grad(grad_output), weight_fp8.T)
    grad_weight = gemm(q_grad(grad_output).T, q_e4m3(x).T)

and differ in where the scales of x and grad_output come from. The weight's always comes from its payload.
"""

from __future__ import annotations

import math

from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.formats import BY_NAME, E4M3, Float8Format
from fp8_ds.nn.shared import Quantized, SharedInput
from fp8_ds.ops.gemm import GemmBackend
from fp8_ds.ops.quantize import Planes, quantize_delayed_planes, quantize_tensorwise_planes, record_amax
from fp8_ds.scaling.delayed import AmaxHistory, AmaxSlot


class TensorwiseRecipe:
    """Scales from the tensor at hand: one amax pass before each cast, nothing remembered from step to step.

    Args:
        linear_config: of the layer.
        shared: of all layers of a model: an input that several of them read is quantised once. None: each for itself.
    """

    name = "tensorwise"

    def __init__(self, linear_config: LinearConfig, shared: SharedInput | None = None) -> None:
        self.grad_format: Float8Format = BY_NAME[linear_config.grad_dtype]
        self.backend: GemmBackend = linear_config.backend
        self._shared = shared

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        """The layer's input in E4M3, [T, I]: always its rows, for the output.

        Args:
            x: [..., I].
            needs_columns: also its columns, for grad_weight.
            record: whether this is a training forward.
        """
        if self._shared is None:
            return self._quantize_tensorwise(x, needs_columns)
        return self._shared.quantize(x, needs_columns, self._quantize_tensorwise)

    def quantize_grad_output(self, grad_TO: Tensor, *, needs_rows: bool, needs_columns: bool) -> Quantized:
        """grad_output in the configured gradient format: rows for grad_input, columns for grad_weight."""
        return _tensorwise(grad_TO, self.grad_format, needs_rows, needs_columns)

    @staticmethod
    def _quantize_tensorwise(x: Tensor, needs_columns: bool) -> Quantized:
        return _tensorwise(_as_matrix(x), E4M3, True, needs_columns)


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

    def _quantize(
        self, x: Tensor, slot: AmaxSlot, fmt: Float8Format, record: bool, needs_rows: bool, needs_columns: bool
    ) -> Quantized:
        if not self.history.ready:
            if record:
                record_amax(x, slot.amax_local)
            return _tensorwise(x, fmt, needs_rows, needs_columns)
        scales = (slot.scale, slot.scale_inv, slot.amax_local)
        planes = _planes(needs_rows, needs_columns)
        return Quantized(*quantize_delayed_planes(x, *scales, fmt, planes, record=record))

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        return self._quantize(_as_matrix(x), self.slot_x, E4M3, record, True, needs_columns)

    def quantize_grad_output(self, grad_TO: Tensor, *, needs_rows: bool, needs_columns: bool) -> Quantized:
        return self._quantize(grad_TO, self.slot_grad, self.grad_format, True, needs_rows, needs_columns)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _tensorwise(x: Tensor, fmt: Float8Format, needs_rows: bool, needs_columns: bool) -> Quantized:
    return Quantized(*quantize_tensorwise_planes(x, fmt, _planes(needs_rows, needs_columns)))


def _planes(needs_rows: bool, needs_columns: bool) -> Planes:
    if not needs_columns:
        return "row"
    return "both" if needs_rows else "col"
