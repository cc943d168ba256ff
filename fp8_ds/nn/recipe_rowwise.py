"""One scale per row: of x and grad_output per token, of the weight per output feature.

A scale that varies along the contracted dim cannot be applied to a product. It is multiplied into the other operand
before that one is quantised, so that one FP8 plane of the weight and one of x serve all GEMMs:

    output[T, O]      = x[T, I] s_x[T]  by weight[O, I] s_w[O]
    grad_input[T, I]  = q_rows(grad * s_w[O])      by weight.T[I, O] without a scale
    grad_weight[O, I] = q_rows((grad * s_x[T]).T)  by x.T[I, T] without a scale
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.formats import E4M3
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe, as_matrix
from fp8_ds.ops._producer import Scaling
from fp8_ds.ops.quantize import quantize_colwise_t, quantize_rowwise


class RowwiseRecipe(Recipe):
    """Each row by its own amax."""

    name = "rowwise"

    def producer_scaling(self) -> Scaling | None:
        return "rowwise"

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight(*quantize_rowwise(weight.contiguous(), E4M3))

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        rows, scale_inv = quantize_rowwise(as_matrix(x), E4M3)
        x_fp8 = Quantized(rows, None, scale_inv)
        return x_fp8.with_columns() if needs_columns else x_fp8

    def quantize_grad_output(
        self, grad_TO: Tensor, weight: Fp8Weight | None, kept: tuple[Tensor, ...] | None
    ) -> Quantized:
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

    def grad_weight(
        self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        assert grad_fp8.columns is not None and grad_fp8.columns_scale_inv is not None
        scales = (grad_fp8.columns_scale_inv, _one(kept[0]))
        return self.product("grad_weight", grad_fp8.columns, kept[0], *scales, dtype)


class RowwiseGradWeightHpRecipe(RowwiseRecipe):
    """As rowwise, but grad_weight is computed in the input's own dtype, from x and grad_output as they are.

    x is then kept in high precision: two bytes an element in bf16.
    """

    name = "rowwise_with_gw_hp"
    needs_grad_columns = False

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        return super().quantize_input(x, needs_columns=False, record=record)

    def kept(self, x: Tensor, x_fp8: Quantized) -> tuple[Tensor, ...]:
        return (as_matrix(x),)

    def grad_weight(
        self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        assert grad_TO is not None
        return (grad_TO.t() @ kept[0]).to(dtype)


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)
