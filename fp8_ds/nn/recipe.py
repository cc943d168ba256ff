"""Recipes by which a linear enters FP8: one object per layer, chosen when the layer is converted.

All recipes are, with T tokens,

    output      = gemm(q_e4m3(x),           weight_fp8)
    grad_input  = gemm(q_grad(grad_output), weight_fp8.T)
    grad_weight = gemm(q_grad(grad_output).T, q_e4m3(x).T)

and differ in which elements of x and grad_output share a scale, and where scales come from. The weight's always come
from its payload. This file: one scale per tensor. The others: recipe_fine.py.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.config import Gemm, LinearConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.shared import SharedInput
from fp8_ds.numerics.formats import BY_NAME, E4M3, Float8Format
from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops._producer import Scaling
from fp8_ds.ops.gemm import GemmBackend, scaled_mm
from fp8_ds.ops.quantize import (
    Layout,
    quantize_and_transpose_delayed,
    quantize_and_transpose_measured,
    quantize_and_transpose_tensorwise,
    quantize_tensorwise,
    record_amax,
)
from fp8_ds.ops.transpose import transpose
from fp8_ds.scaling.delayed import AmaxHistory
from fp8_ds.scaling.granularity import OF_RECIPE, TENSOR, CopiedScales

if TYPE_CHECKING:
    from fp8_ds.nn.payload import Fp8Payload


_GRAD_FORMATS = {name: replace(fmt) for name, fmt in BY_NAME.items()}
"""Formats equal to the constants, but other objects. torch.compile (2.11 to 2.13, `make_dupe_guard` in
torch/_dynamo/guards.py) has no guard on what an argument holds if that is also a constant of a module: the graph of a
layer whose gradients are in E4M3 would serve one whose gradients are in E5M2."""


_COPY_TRAINS = (
    "fp8: a copy of a model with the recipe delayed is trained: the scales of its inputs and gradients stay those of "
    "the moment it was copied, and what grows beyond them saturates. Give deepspeed.initialize a model of its own, "
    "loaded with the state dict, or use another recipe."
)


Kept = tuple[Tensor, ...]
"""Tensors of the input that grad_weight needs, saved from forward to backward."""


class Fp8Weight(NamedTuple):
    """A weight as a GEMM reads it: float8_e4m3fn [O, I], and its grid (scaling/granularity.py) to leave FP8."""

    data: Tensor
    scale_inv: Tensor

    def transposed(self) -> Tensor:
        """Return the bytes as [I, O], the contracted dim of grad_input last."""
        return transpose(self.data) if self.data.is_contiguous() else self.data.t()


class Recipe(ABC):
    """The three GEMMs of one linear, from and to high precision.

    Attributes:
        shared: of all layers of a model: an input that several of them read is quantised once. None: each for itself.
        needs_grad_columns: whether `grad_weight` multiplies the quantised grad_output.
        is_fp8: whether its GEMMs run in FP8.
        is_turned: whether the layer's weight is stored [I, O], and its gradient, too (`Fp8Conv1D`).
        copied: scales that quantise the weight in a layer of a copied model (`copied_scales`); else None.
    """

    name: str
    needs_grad_columns = True
    is_fp8 = True
    is_turned = False
    copied: CopiedScales | None = None

    def __init__(self, linear_config: LinearConfig, shared: SharedInput | None = None) -> None:
        self.grad_format: Float8Format = _GRAD_FORMATS[linear_config.grad_dtype]
        self.backend: GemmBackend = linear_config.backend
        self.fast_gemms = linear_config.fast_gemms
        self.linear_config = linear_config
        self.shared = shared

    def describe(self) -> str:
        """Return the text for `print(model)`."""
        fast = "+".join(self.fast_gemms) or "none"
        return f"fp8={self.name}, grad={self.grad_format.name}, backend={self.backend}, fast={fast}"

    def product(
        self, gemm: Gemm, a_fp8: Tensor, b_fp8: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Call `scaled_mm` by this layer's backend, with the accumulation that it has for `gemm`."""
        fast = gemm in self.fast_gemms
        return scaled_mm(a_fp8, b_fp8, scale_inv_a, scale_inv_b, dtype, self.backend, use_fast_accum=fast)

    def read_weight(self, weight: Tensor) -> Fp8Weight:
        """Read the weight, see nn/linear.py."""
        payload: Fp8Payload | None = getattr(weight, "_fp8", None)
        if payload is None and self.copied is not None and self.copied.fit(weight):
            return Fp8Weight(*self.copied.quantize(weight.detach()))
        if payload is None:
            return self.quantize_weight(weight.detach())
        if payload.data is not None:
            return Fp8Weight(payload.data, payload.scale_inv)
        # The Parameter subclass of a payload answers readers with de-quantised values; here the stored ones are wanted.
        refuse_released(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return Fp8Weight(payload.quantize(weight.detach()), payload.scale_inv)

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        """Quantize the layer's input [..., I] to E4M3 [T, I]: rows for the output, columns for grad_weight.

        `record`: whether this is a training forward.
        """
        if self.shared is None:
            return self._quantize_input(x, needs_columns, record)
        quantize = partial(self._quantize_input, record=record)
        return self.shared.quantize(x, needs_columns, quantize, self._complete, self._epoch(record))

    def offer(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> None:
        """Give layers that read `x` what its producer has quantised, as `producer_scaling` says."""
        if self.shared is not None:
            self.shared.offer(x, x_fp8, self._epoch(record))

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        """Return the input `x` as another layer with this kind of recipe, or a producer, has quantised it."""
        return x_fp8

    def producer_scaling(self) -> Scaling | None:
        """Return how a fused producer of this layer's input quantises it; None: it leaves that to the layer."""
        return None

    def scaling_without_hp(self) -> Scaling | None:
        """Return `producer_scaling` for a producer that writes no bf16; None: the layer has to see bf16."""
        return self.producer_scaling()

    def grad_scaling(self) -> Scaling | None:
        """Return how a fused producer of grad_output quantises it to `grad_format`; None: the layer does that."""
        return None

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        """Return what grad_weight needs of the input."""
        assert x_fp8.columns is not None
        return x_fp8.columns, x_fp8.scale_inv

    @abstractmethod
    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        """Quantize a weight [O, I] without a payload (no ZeRO), by current scaling."""

    @abstractmethod
    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized: ...

    def _complete(self, x_fp8: Quantized) -> Quantized:
        return x_fp8.with_columns()

    def _epoch(self, record: bool) -> object:
        """Return the epoch; inputs quantised in another one are quantised again."""
        return None

    @abstractmethod
    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        """Quantize grad_output [T, O], contiguous, to the configured gradient format.

        Args:
            weight: what grad_input multiplies its rows with; None if it is not wanted.
            kept: what grad_weight multiplies its columns with; None if it is not wanted.
        """

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute the output, [T, O], by one scale for all or one for each row of either operand."""
        assert x_fp8.rows is not None
        return self.product("output", x_fp8.rows, weight.data, x_fp8.scale_inv, weight.scale_inv, dtype)

    def biased_output(self, x_fp8: Quantized, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute `output` with `bias` [O] added."""
        output_TO = self.output(x_fp8, weight, dtype)
        return output_TO if bias is None else output_TO + bias.to(dtype)

    @abstractmethod
    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute grad_input, [T, I]."""

    @property
    def parts(self) -> Recipe:
        """Recipe for products of parts, of experts, that are counted as a whole: a monitor sees none of them."""
        return self

    def move(self, device: torch.device) -> None:  # noqa: B027  # most have nothing to move
        """Follow the layer's weight to `device`, with what a copy has beside it."""

    def count_whole(self, x_fp8: Quantized, weight: Fp8Weight) -> None:  # noqa: B027  # most have nothing to do
        """Let a monitor count the codes of an input and a weight of which `parts.output` multiplies parts."""

    def grad_rows(self, grad_fp8: Quantized) -> Tensor:
        """Return codes [T, O] of grad_output for a `grad_input` that is not the recipe's own; the monitor sees them."""
        assert grad_fp8.rows is not None
        return grad_fp8.rows

    @abstractmethod
    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Compute grad_weight, [O, I] or as the weight is stored; without grad_TO if a producer has quantised it."""


class TensorwiseRecipe(Recipe):
    """Scales from the tensor at hand: one amax pass before each cast, nothing remembered from step to step."""

    name = "tensorwise"

    def producer_scaling(self) -> Scaling | None:
        return "tensorwise"

    def grad_scaling(self) -> Scaling | None:
        return "tensorwise"

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight(*quantize_tensorwise(weight, E4M3))

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        return _tensorwise(as_matrix(x), E4M3, True, needs_columns)

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        return _tensorwise(grad_TO, self.grad_format, weight is not None, kept is not None)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        scales = (grad_fp8.scale_inv, weight.scale_inv)
        return self.product("grad_input", grad_fp8.rows, weight.transposed(), *scales, dtype)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.columns is not None
        x_fp8_IT, x_scale_inv = kept
        if self.is_turned:
            return self.product("grad_weight", x_fp8_IT, grad_fp8.columns, x_scale_inv, grad_fp8.scale_inv, dtype)
        return self.product("grad_weight", grad_fp8.columns, x_fp8_IT, grad_fp8.scale_inv, x_scale_inv, dtype)


class DelayedRecipe(TensorwiseRecipe):
    """Scales from an AmaxHistory, which this step's amaxes enter; until its first update as tensorwise.

    A slot that saw no tensor before the first update has scale 1 until the update after its first use. Layers that
    share an input have seen the same amaxes, so their scales are the same: the first one's FP8 tensors serve all.

    Attributes:
        history: shared by all layers.
        slot_x: slot of the layer's input.
        slot_grad: slot of its grad_output.
        leader: the slot of the first of several layers that read the same input; its scale equals this layer's. In a
            graph all of them quantise by it: equal ops of equal arguments, of which one is left. None: it is not known
            who else reads the input.
    """

    name = "delayed"

    def __init__(
        self,
        linear_config: LinearConfig,
        history: AmaxHistory,
        slot_x: int,
        slot_grad: int,
        shared: SharedInput | None = None,
    ) -> None:
        super().__init__(linear_config, shared)
        self.history = history
        self.slot_x = history.slot(slot_x)
        self.slot_grad = history.slot(slot_grad)
        self.leader: AmaxSlot | None = None

    def producer_scaling(self) -> Scaling | None:
        return self.slot_x if self.history.ready else "tensorwise"

    def scaling_without_hp(self) -> Scaling | None:
        """Return None until there is a scale: the amax is recorded from bf16."""
        return self.producer_scaling() if self.history.ready else None

    def grad_scaling(self) -> Scaling | None:
        return self.slot_grad if self.history.ready else None

    def move(self, device: torch.device) -> None:
        if not self.history.is_copy or self.slot_x.scale.device == device:
            return
        if self.history.scale.device != device:
            self.history.move(device)
        self.slot_x, self.slot_grad, self.leader = map(_slot_again, (self.slot_x, self.slot_grad, self.leader))

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        x_fp8 = super().quantize_input(x, needs_columns=needs_columns, record=record)
        return self.adopt(x, x_fp8, record=record)

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        recorded = x_fp8.slot
        if not record or recorded is self.slot_x:
            return x_fp8
        slots = [self.slot_x]
        if self.leader is not None and self.leader is not self.slot_x and torch.compiler.is_compiling():
            slots.append(self.leader)  # which may not be called, or not train
        for slot in slots:
            if recorded is None:
                record_amax(x, slot.amax_local)
            else:
                slot.amax_local.copy_(torch.maximum(slot.amax_local, recorded.amax_local))
        return x_fp8

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        if not self.history.ready:
            return super()._quantize_input(x, needs_columns, record)
        if self.leader is not None and record and torch.compiler.is_compiling():
            scales = (self.leader.scale, self.leader.scale_inv)
            layout = _layout(True, needs_columns)
            rows, columns, scale_inv, amax = quantize_and_transpose_measured(as_matrix(x), *scales, E4M3, layout)
            return Quantized(rows, columns, scale_inv, slot=AmaxSlot(amax, *scales))
        return _delayed(as_matrix(x), self.slot_x, E4M3, record, True, needs_columns)

    def _epoch(self, record: bool) -> object:
        """Return the number of updates and `record`: each update changes the scales, and old records do not count."""
        return self.history.num_updates, record

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        needs_rows, needs_columns = weight is not None, kept is not None
        if not torch.compiler.is_compiling() and self.history.ready and self.history.is_copy:
            warnings.warn(_COPY_TRAINS, stacklevel=2)
        if self.history.ready:
            return _delayed(grad_TO, self.slot_grad, self.grad_format, True, needs_rows, needs_columns)
        record_amax(grad_TO, self.slot_grad.amax_local)
        return _tensorwise(grad_TO, self.grad_format, needs_rows, needs_columns)


def copied_scales(weight: Any, recipe: Recipe) -> CopiedScales | None:
    """Return `copied` for a copy of an engine's layer, or of a copy; None: it is in bf16, or its weight is not here."""
    payload: Fp8Payload | None = getattr(weight, "_fp8", None)
    if payload is None:
        return recipe.copied
    if not recipe.is_fp8 or weight.numel() == 0:
        return None
    granularity = TENSOR if payload.scale.dim() == 0 else OF_RECIPE[recipe.name]
    return CopiedScales.of(weight.detach(), granularity, payload.scale, payload.scale_inv)


def refuse_released(weight: Any) -> None:
    """Raise UnsupportedError if `weight`, which has a payload, is gathered neither in FP8 nor in bf16."""
    if weight.numel() == 0:
        raise UnsupportedError(
            f"{weight._fp8.name}: expected a weight that is gathered, got one that ZeRO-3 has released. It is there "
            "from a call of its module on, for that forward and one backward of it: call the module and not its "
            '`forward`, and in place of `retain_graph=True` add the losses up for one backward. Or set "stage" to 2.'
        )


def _slot_again(slot: AmaxSlot | None) -> Any:
    """Return the slot where its history has it now."""
    return slot if slot is None or slot.origin is None else slot.origin[0].slot(slot.origin[1])


def as_matrix(x: Tensor) -> Tensor:
    """Return [..., C] as [T, C], contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _tensorwise(x: Tensor, fmt: Float8Format, needs_rows: bool, needs_columns: bool) -> Quantized:
    return Quantized(*quantize_and_transpose_tensorwise(x, fmt, _layout(needs_rows, needs_columns)))


def _delayed(
    x: Tensor, slot: AmaxSlot, fmt: Float8Format, record: bool, needs_rows: bool, needs_columns: bool
) -> Quantized:
    scales = (slot.scale, slot.scale_inv, slot.amax_local)
    layout = _layout(needs_rows, needs_columns)
    return Quantized(*quantize_and_transpose_delayed(x, *scales, fmt, layout, record=record), slot=slot)


def _layout(needs_rows: bool, needs_columns: bool) -> Layout:
    if not needs_columns:
        return "row"
    return "both" if needs_rows else "col"
