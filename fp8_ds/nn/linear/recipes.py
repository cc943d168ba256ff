"""The recipes: one scale for a tensor, its own or delayed; one per row; one per block; and bf16, for a while.

By row means per token for x and grad_output, per output feature for the weight. A scale that varies along the
contracted dim cannot be applied to a product. It is multiplied into the other operand before that one is quantised, so
that one FP8 tensor of the weight and one of x serve all GEMMs:

    output[T, O]      = x[T, I] s_x[T]  by weight[O, I] s_w[O]
    grad_input[T, I]  = q_rows(grad * s_w[O])      by weight.T[I, O] without a scale
    grad_weight[O, I] = q_rows((grad * s_x[T]).T)  by x.T[I, T] without a scale

By block means one power of two for 1x128 of x and grad_output, for 128x128 of the weight. See ops/blockwise.

In bf16 x and grad_output are used as they are; W is bf16 of the masters, which ZeRO keeps beside the FP8 bytes
meanwhile.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.recipe import Fp8Weight, InputCache, Kept, Quantized, Recipe, as_matrix, refuse_released
from fp8_ds.numerics.formats import E4M3, Float8Format
from fp8_ds.numerics.scale import AmaxHistory, AmaxSlot
from fp8_ds.ops._producer import Scaling
from fp8_ds.ops.blockwise import BLOCK, num_blocks, quantize_blockwise, transpose_blockwise
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise
from fp8_ds.ops.quantize import (
    Layout,
    quantize_and_transpose_delayed,
    quantize_and_transpose_measured,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_rowwise,
    quantize_tensorwise,
    record_amax,
)

_ROW_BLOCK, _TILE = (1, BLOCK), (BLOCK, BLOCK)


_COPY_TRAINS = (
    "fp8: a copy of a model with the recipe delayed is trained: the scales of its inputs and gradients stay those of "
    "the moment it was copied, and what grows beyond them saturates. Give deepspeed.initialize a model of its own, "
    "loaded with the state dict, or use another recipe."
)


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
        if self.weight_is_transposed:
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
        input_cache: InputCache | None = None,
    ) -> None:
        super().__init__(linear_config, input_cache)
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


def _slot_again(slot: AmaxSlot | None) -> Any:
    """Return the slot where its history has it now."""
    return slot if slot is None or slot.origin is None else slot.origin[0].slot(slot.origin[1])


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


class RowwiseRecipe(Recipe):
    """One scale for each row, from its own amax."""

    name = "rowwise"

    def producer_scaling(self) -> Scaling | None:
        return "rowwise"

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight(*quantize_rowwise(weight.contiguous(), E4M3))

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        rows, scale_inv = quantize_rowwise(as_matrix(x), E4M3)
        x_fp8 = Quantized(rows, None, scale_inv)
        return x_fp8.with_columns() if needs_columns else x_fp8

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        rows = columns = columns_scale_inv = None
        if weight is not None:
            fold = None if weight.scale_inv.dim() == 0 else weight.scale_inv
            rows, scale_inv = quantize_rowwise(grad_TO, self.grad_format, fold)
        else:
            scale_inv = grad_TO.new_empty((), dtype=torch.float32)
        if kept is not None:
            columns, columns_scale_inv = quantize_colwise_t(grad_TO, self.grad_format, kept[1])
        return Quantized(rows, columns, scale_inv, columns_scale_inv)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        left = weight.scale_inv if weight.scale_inv.dim() == 0 else _one(grad_fp8.rows)
        return self.product("grad_input", grad_fp8.rows, weight.transposed(), grad_fp8.scale_inv, left, dtype)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.columns is not None and grad_fp8.columns_scale_inv is not None
        scales = (grad_fp8.columns_scale_inv, _one(kept[0]))
        return self.product("grad_weight", grad_fp8.columns, kept[0], *scales, dtype)


class RowwiseGradWeightHpRecipe(RowwiseRecipe):
    """Rowwise scales, but grad_weight is computed in the input's own dtype, from x and grad_output as they are.

    x is then kept in high precision: two bytes an element in bf16.
    """

    name = "rowwise_with_gw_hp"
    needs_grad_columns = False

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        return super().quantize_input(x, needs_columns=False, record=record)

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        return (as_matrix(x),)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_TO is not None
        return (grad_TO.t() @ kept[0]).to(dtype)


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


class BlockwiseRecipe(Recipe):
    """Blocks along the contracted dim of each GEMM: x and grad_output are quantised as rows and as columns, each by
    scales of its own, in one read."""

    name = "blockwise"

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        quantized = quantize_blockwise(weight, E4M3, _TILE, "row")
        assert quantized.x_fp8 is not None and quantized.scale_inv is not None
        return Fp8Weight(quantized.x_fp8, quantized.scale_inv)

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        quantized = quantize_blockwise(as_matrix(x), E4M3, _ROW_BLOCK, "both" if needs_columns else "row")
        assert quantized.scale_inv is not None
        return Quantized(quantized.x_fp8, quantized.x_fp8_t, quantized.scale_inv, quantized.scale_inv_t)

    def _complete(self, x_fp8: Quantized) -> Quantized:
        """Make columns from the codes, exactly but for what becomes subnormal."""
        assert x_fp8.rows is not None
        columns, columns_scale_inv = transpose_blockwise(x_fp8.rows, x_fp8.scale_inv)
        return replace(x_fp8, columns=columns, columns_scale_inv=columns_scale_inv)

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        assert x_fp8.columns is not None and x_fp8.columns_scale_inv is not None
        return x_fp8.columns, x_fp8.columns_scale_inv

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        wanted: Layout = "row" if kept is None else "col" if weight is None else "both"
        quantized = quantize_blockwise(grad_TO, self.grad_format, _ROW_BLOCK, wanted)
        scale_inv = quantized.scale_inv if quantized.scale_inv is not None else quantized.scale_inv_t
        assert scale_inv is not None
        return Quantized(quantized.x_fp8, quantized.x_fp8_t, scale_inv, quantized.scale_inv_t)

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert x_fp8.rows is not None
        return scaled_mm_blockwise(x_fp8.rows, weight.data, x_fp8.scale_inv, _tiles(weight), dtype, self.backend)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        scales = (grad_fp8.scale_inv, _tiles(weight).t())
        return scaled_mm_blockwise(grad_fp8.rows, weight.transposed(), *scales, dtype, self.backend)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.columns is not None and grad_fp8.columns_scale_inv is not None
        scales = (grad_fp8.columns_scale_inv, kept[1])
        return scaled_mm_blockwise(grad_fp8.columns, kept[0], *scales, dtype, self.backend)


RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe for recipe in (TensorwiseRecipe, RowwiseRecipe, RowwiseGradWeightHpRecipe, BlockwiseRecipe)
}
"""Recipes without a history, by name."""


def _tiles(weight: Fp8Weight) -> Tensor:
    """Return the weight's scales as a grid of tiles; one for all (a split master's) is written into each."""
    if weight.scale_inv.dim() == 2:
        return weight.scale_inv
    return weight.scale_inv.repeat(num_blocks(weight.data.shape[0]), num_blocks(weight.data.shape[1]))


class Bf16Recipe(Recipe):
    """Recipe in place of `fp8`, which may come back. Amaxes of delayed scaling are still recorded, one more read of
    each tensor, unless the layer is plain. `Quantized.rows` are in high precision here."""

    name = "bf16"
    needs_grad_columns = False
    is_fp8 = False

    def __init__(self, fp8: Recipe, is_plain: bool = False) -> None:
        self.fp8 = fp8
        self.is_plain = is_plain
        self.grad_format = fp8.grad_format
        self.backend = fp8.backend
        self.weight_is_transposed = fp8.weight_is_transposed
        self.input_cache = None

    def describe(self) -> str:
        return f"fp8=bf16 {'by its size' if self.is_plain else 'for now'}, else {self.fp8.describe()}"

    @property
    def recorded(self) -> DelayedRecipe | None:
        """The recipe whose amaxes are recorded; None: none are."""
        return self.fp8 if isinstance(self.fp8, DelayedRecipe) and not self.is_plain else None

    def move(self, device: torch.device) -> None:
        self.fp8.move(device)

    def read_weight(self, weight: Tensor) -> Fp8Weight:
        """Return bf16 of the master, which ZeRO keeps beside the bytes (stages 1 and 2) or has gathered (stage 3)."""
        payload = getattr(weight, "_fp8", None)
        if payload is not None and payload.hp is not None:
            return Fp8Weight(payload.hp, payload.scale_inv)
        assert payload is None or payload.data is None, f"{payload.name} is gathered in FP8 for a layer in bf16"
        if payload is not None:
            refuse_released(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return Fp8Weight(weight.detach(), weight.new_ones((), dtype=torch.float32))

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight(weight, weight.new_ones((), dtype=torch.float32))

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        return self._quantize_input(x, False, record)

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        return (as_matrix(x),)

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        if record and (delayed := self.recorded) is not None:
            record_amax(x, delayed.slot_x.amax_local)
        return _as_it_is(as_matrix(x))

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        if (delayed := self.recorded) is not None:
            record_amax(grad_TO, delayed.slot_grad.amax_local)
        return _as_it_is(grad_TO)

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        return self.biased_output(x_fp8, weight, None, dtype)

    def biased_output(self, x_fp8: Quantized, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute the output with one rounding, as nn.Linear does."""
        assert x_fp8.rows is not None
        own = weight.data.dtype
        bias = None if bias is None else bias.to(own)
        return F.linear(x_fp8.rows.to(own), weight.data, bias).to(dtype)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        return (grad_fp8.rows.to(weight.data.dtype) @ weight.data).to(dtype)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_TO is not None
        x_TI = kept[0].to(grad_TO.dtype)
        return (x_TI.t() @ grad_TO if self.weight_is_transposed else grad_TO.t() @ x_TI).to(dtype)


def _as_it_is(x: Tensor) -> Quantized:
    return Quantized(x, None, x.new_ones((), dtype=torch.float32))
