"""Blockwise quantisation in plain torch, slow and obvious: the reference of the kernels, also used on CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
"""Elements of a block along its longer sides. Source: DeepSeek-V3 report (arXiv 2412.19437) section 3.3.2; cuBLASLt's
only block size on Hopper."""

MAX_EXPONENT = 126
"""Largest scale, 2**126: its inverse is the smallest normal float32. See `numerics.scale.MAX_SCALE`."""


def _transposed(x: Tensor) -> Tensor:
    """Copy the transpose. t().contiguous() would leave the strides of single rows and of empty matrices as they are."""
    return x.new_empty(x.shape[1], x.shape[0]).copy_(x.t())


def outer_major(scale_inv: Tensor) -> Tensor:
    """Copy [rows, blocks] so that rows are next to each other in memory: cuBLASLt's layout for 1x128 blocks."""
    return _transposed(scale_inv).t()


def _blocks(x: Tensor, block_rows: int) -> Tensor:
    """Reshape [R, C] to [ceil(R / block_rows), block_rows, ceil(C / 128), 128], padded with zeros."""
    rows, cols = -(-x.shape[0] // block_rows), -(-x.shape[1] // BLOCK)
    padded = x.new_zeros(rows * block_rows, cols * BLOCK)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded.view(rows, block_rows, cols, BLOCK)


def _expand(blocks: Tensor, block_rows: int, like: Tensor) -> Tensor:
    """Expand a number per block to one per element of `like`."""
    rows = blocks.repeat_interleave(block_rows, 0) if block_rows > 1 else blocks
    return rows.repeat_interleave(BLOCK, 1)[: like.shape[0], : like.shape[1]]


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent as float32, exactly (torch.exp2 and ldexp need not be exact); for normal results."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return the largest power of two that takes each amax to `fp8_max` or below, and its inverse.

    An amax of 0 gives scale 1, a tiny one at most 2**126. A non-finite amax gives scale 1 and scale_inv NaN.
    """
    finite = torch.isfinite(amax)
    scalable = finite & (amax > 0)
    # amax = mantissa * 2**exponent with 0.5 <= mantissa < 1, and fp8_max likewise.
    mantissa, exponent = torch.frexp(torch.where(scalable, amax, torch.ones_like(amax)))
    max_mantissa, max_exponent = math.frexp(fp8_max)
    exponent = max_exponent - exponent - (mantissa > max_mantissa).to(exponent.dtype)
    exponent = torch.where(scalable, exponent.clamp(max=MAX_EXPONENT), torch.zeros_like(exponent))
    scale, scale_inv = _power_of_two(exponent), _power_of_two(-exponent)
    return scale, torch.where(finite, scale_inv, torch.full_like(scale_inv, float("nan")))


def block_amax(x: Tensor, start: int, num_rows: int, num_cols: int, block_rows: int) -> Tensor:
    """Return largest magnitudes of the blocks of [num_rows, num_cols], which is 0 but for elements from `start` on."""
    if x.numel() == 0:
        return x.new_zeros((-(-num_rows // block_rows), -(-num_cols // BLOCK)), dtype=torch.float32)
    whole = x.new_zeros(num_rows * num_cols)
    whole[start : start + x.numel()] = x.reshape(-1)
    amax = _blocks(whole.view(num_rows, num_cols), block_rows).abs().amax((1, 3)).to(torch.float32)
    return torch.where(amax.isnan(), torch.full_like(amax, float("nan")), amax)


def _quantize(x: Tensor, dtype: torch.dtype, fp8_max: float, block_rows: int) -> tuple[Tensor, Tensor]:
    amax = block_amax(x, 0, x.shape[0], x.shape[1], block_rows)
    scale, scale_inv = scale_from_amax(amax, fp8_max)
    scaled = x.to(torch.float32) * _expand(scale, block_rows, x)
    return scaled.clamp(-fp8_max, fp8_max).to(dtype), scale_inv


def quantize_blockwise(
    x: Tensor, dtype: torch.dtype, fp8_max: float, block_rows: int, row: bool, col: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x_fp8, scale_inv, x_fp8_t, scale_inv_t); a layout that is not asked for is empty."""
    x = x.contiguous()  # the results would take over other strides
    x_fp8, x_fp8_t = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=dtype)
    scale_inv, scale_inv_t = x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    if row:
        x_fp8, scale_inv = _quantize(x, dtype, fp8_max, block_rows)
        scale_inv = outer_major(scale_inv) if block_rows == 1 else scale_inv
    if col:
        # 128x128 blocks of the transpose are those of x, transposed.
        x_fp8_t, scale_inv_t = _quantize(_transposed(x), dtype, fp8_max, block_rows)
        scale_inv_t = outer_major(scale_inv_t) if block_rows == 1 else scale_inv_t
    return x_fp8, scale_inv, x_fp8_t, scale_inv_t


def transpose_blockwise(x_fp8: Tensor, scale_inv: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Change 1x128 blocks along the rows of x to 1x128 blocks along its columns."""
    num_rows, num_cols = x_fp8.shape
    values = x_fp8.to(torch.float32)
    # A block of zeros has a scale_inv that means nothing (1, from amax 0): it must not crush its neighbours.
    occupied = (_blocks(values, 1) != 0).any(3).squeeze(1) | scale_inv.isnan()
    tiles = -(-num_rows // BLOCK)
    candidates = scale_inv.new_zeros(tiles * BLOCK, scale_inv.shape[1])
    candidates[:num_rows] = torch.where(occupied, scale_inv, torch.zeros_like(scale_inv))
    largest = candidates.view(tiles, BLOCK, scale_inv.shape[1]).amax(1)
    new = torch.where(largest == 0, torch.ones_like(largest), largest)
    new = torch.where(new.isnan(), torch.full_like(new, float("nan")), new)
    ratio = scale_inv / new.repeat_interleave(BLOCK, 0)[:num_rows]
    # NaN: a poisoned tile keeps its codes. Above 1: a block of zeros.
    ratio = torch.where(ratio < 1, ratio, torch.ones_like(ratio))
    rescaled = values * _expand(ratio, 1, values)
    x_fp8_t = _transposed(rescaled.clamp(-fp8_max, fp8_max)).to(x_fp8.dtype)
    scale_inv_t = new.repeat_interleave(BLOCK, 1)[:, :num_cols].t()
    return x_fp8_t, outer_major(scale_inv_t)


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    return (x_fp8.to(torch.float32) * _expand(scale_inv, 1, x_fp8)).to(torch.bfloat16)
