"""One power-of-two scale per block: 1x128 for x and grad_output, 128x128 for the weight. See ops/blockwise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8_ds.formats import E4M3
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe, as_matrix
from fp8_ds.ops.blockwise import BLOCK, Planes, num_blocks, quantize_blockwise, transpose_blockwise
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise

_ROW_BLOCK, _TILE = (1, BLOCK), (BLOCK, BLOCK)


class BlockwiseRecipe(Recipe):
    """Blocks along the contracted dim of each GEMM: x and grad_output are quantised as rows and as columns, each by
    scales of its own, in one read."""

    name = "blockwise"

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        planes = quantize_blockwise(weight, E4M3, _TILE, "row")
        assert planes.x_fp8 is not None and planes.scale_inv is not None
        return Fp8Weight(planes.x_fp8, planes.scale_inv)

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        planes = quantize_blockwise(as_matrix(x), E4M3, _ROW_BLOCK, "both" if needs_columns else "row")
        assert planes.scale_inv is not None
        return Quantized(planes.x_fp8, planes.x_fp8_t, planes.scale_inv, planes.scale_inv_t)

    def _complete(self, x_fp8: Quantized) -> Quantized:
        """From the codes, which is exact but for what becomes subnormal."""
        assert x_fp8.rows is not None
        columns, columns_scale_inv = transpose_blockwise(x_fp8.rows, x_fp8.scale_inv)
        return replace(x_fp8, columns=columns, columns_scale_inv=columns_scale_inv)

    def kept(self, x: Tensor, x_fp8: Quantized) -> tuple[Tensor, ...]:
        assert x_fp8.columns is not None and x_fp8.columns_scale_inv is not None
        return x_fp8.columns, x_fp8.columns_scale_inv

    def quantize_grad_output(
        self, grad_TO: Tensor, weight: Fp8Weight | None, kept: tuple[Tensor, ...] | None
    ) -> Quantized:
        wanted: Planes = "row" if kept is None else "col" if weight is None else "both"
        planes = quantize_blockwise(grad_TO, self.grad_format, _ROW_BLOCK, wanted)
        scale_inv = planes.scale_inv if planes.scale_inv is not None else planes.scale_inv_t
        assert scale_inv is not None
        return Quantized(planes.x_fp8, planes.x_fp8_t, scale_inv, planes.scale_inv_t)

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert x_fp8.rows is not None
        return scaled_mm_blockwise(x_fp8.rows, weight.data, x_fp8.scale_inv, _tiles(weight), dtype, self.backend)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        scales = (grad_fp8.scale_inv, _tiles(weight).t())
        return scaled_mm_blockwise(grad_fp8.rows, weight.transposed(), *scales, dtype, self.backend)

    def grad_weight(
        self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        assert grad_fp8.columns is not None and grad_fp8.columns_scale_inv is not None
        scales = (grad_fp8.columns_scale_inv, kept[1])
        return scaled_mm_blockwise(grad_fp8.columns, kept[0], *scales, dtype, self.backend)


def _tiles(weight: Fp8Weight) -> Tensor:
    """The weight's scales as a grid of tiles; one for all (a split master's) is written into each."""
    if weight.scale_inv.dim() == 2:
        return weight.scale_inv
    return weight.scale_inv.repeat(num_blocks(weight.data.shape[0]), num_blocks(weight.data.shape[1]))
