"""Finer scales than one for a tensor: one per row, or one per block.

By row means per token for x and grad_output, per output feature for the weight. A scale that varies along the
contracted dim cannot be applied to a product. It is multiplied into the other operand before that one is quantised, so
that one FP8 tensor of the weight and one of x serve all GEMMs:

    output[T, O]      = x[T, I] s_x[T]  by weight[O, I] s_w[O]
    grad_input[T, I]  = q_rows(grad * s_w[O])      by weight.T[I, O] without a scale
    grad_weight[O, I] = q_rows((grad * s_x[T]).T)  by x.T[I, T] without a scale

By block means one power of two for 1x128 of x and grad_output, for 128x128 of the weight. See ops/blockwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Kept, Recipe, as_matrix
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._producer import Scaling
from fp8_ds.ops.blockwise import BLOCK, num_blocks, quantize_blockwise, transpose_blockwise
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise
from fp8_ds.ops.quantize import Layout, quantize_colwise_t, quantize_rowwise

_ROW_BLOCK, _TILE = (1, BLOCK), (BLOCK, BLOCK)


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


def _tiles(weight: Fp8Weight) -> Tensor:
    """Return the weight's scales as a grid of tiles; one for all (a split master's) is written into each."""
    if weight.scale_inv.dim() == 2:
        return weight.scale_inv
    return weight.scale_inv.repeat(num_blocks(weight.data.shape[0]), num_blocks(weight.data.shape[1]))
