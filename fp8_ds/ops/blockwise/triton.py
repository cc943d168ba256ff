"""Blockwise quantisation by Triton kernels; the same bits as `reference`, one launch per call, inputs not empty.

On CPU these run under Triton's interpreter only.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fp8_ds.ops._device import runs_ptx
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops._tiles import as_words, is_even
from fp8_ds.ops.blockwise import empty_quantized, num_blocks
from fp8_ds.ops.blockwise.kernel import block_amax_kernel, dequantize_kernel, quantize_kernel, transpose_kernel
from fp8_ds.ops.blockwise.pairs_kernel import quantize_pairs_kernel
from fp8_ds.ops.blockwise.reference import BLOCK

WARPS = {"row": 2, "tile": 4, "amax": 8, "dequantize": 4}
"""Warps per program, by what it makes. 16 elements a thread and row are one vector of FP8: 4 warps hold a 128x128 tile
in 128 elements a thread, 2 warps a 32x128 one. Tried by benchmarks/kernels_tune.py on an H200."""

_TILE_REGISTERS = 168
"""Most registers per thread where a program makes a transpose: three programs share a processor."""

_ROW_QUARTER = 8
_TILE_QUARTER = BLOCK // 4
_AMAX_ROWS = 32
DEQUANTIZE_ROWS = 32
"""Rows of a program that dequantizes, 32 elements a thread: two vectors of 16 codes."""


def _has_pairs(x: Tensor) -> bool:
    """Whether `x` consists of whole tiles whose rows can be read as words of two."""
    num_rows, num_cols = x.shape
    is_aligned = x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and is_even(num_rows, num_cols, _TILE_QUARTER) and is_aligned


def _bits(number: float) -> int:
    """Return the bits of a float32 as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def quantize_blockwise(
    x: Tensor, dtype: torch.dtype, fp8_max: float, block_rows: int, row: bool, col: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Triton version of `reference.quantize_blockwise`."""
    ptx = runs_ptx(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_cols = x.shape
    square = block_rows > 1
    x_fp8, scale_inv = empty_quantized(x, dtype, block_rows, row)
    x_fp8_t, scale_inv_t = empty_quantized(x.t(), dtype, block_rows, col)
    kind, quarter = ("tile", _TILE_QUARTER) if square or col else ("row", _ROW_QUARTER)
    words = as_words(x_fp8_t) if col else None
    options = {"maxnreg": _TILE_REGISTERS} if ptx and kind == "tile" else {}
    if row and col and not square and _has_pairs(x):
        launch(
            quantize_pairs_kernel,
            num_blocks(num_rows) * num_blocks(num_cols),
            x.view(torch.int32),
            x.stride(0) // 2,
            x_fp8.view(torch.int16),
            scale_inv,
            words,
            scale_inv_t,
            num_rows,
            num_cols,
            MAX_BITS=_bits(fp8_max),
            IS_E4M3=dtype == torch.float8_e4m3fn,
            PTX=ptx,
            num_warps=WARPS[kind],
            **options,
        )
        return x_fp8, scale_inv, x_fp8_t, scale_inv_t
    launch(
        quantize_kernel,
        ceil_div(num_rows, 4 * quarter) * num_blocks(num_cols),
        x,
        x.stride(0),
        x_fp8.view(torch.uint8) if row else None,
        scale_inv if row else None,
        words,
        scale_inv_t if col else None,
        num_rows,
        num_cols,
        SQUARE=square,
        ROW=row,
        COL=col,
        EVEN=is_even(num_rows, num_cols, quarter),
        WORDS=words is not None and words.dtype == torch.int32,
        QUARTER=quarter,
        MAX_BITS=_bits(fp8_max),
        IS_E4M3=dtype == torch.float8_e4m3fn,
        PTX=ptx,
        num_warps=WARPS[kind],
        **options,
    )
    return x_fp8, scale_inv, x_fp8_t, scale_inv_t


def transpose_blockwise(x_fp8: Tensor, scale_inv: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Triton version of `reference.transpose_blockwise`; `fp8_max` follows from the dtype here."""
    x_fp8 = x_fp8.contiguous()
    num_rows, num_cols = x_fp8.shape
    x_fp8_t, scale_inv_t = empty_quantized(x_fp8.t(), x_fp8.dtype, 1)
    words = as_words(x_fp8_t)
    launch(
        transpose_kernel,
        num_blocks(num_rows) * num_blocks(num_cols),
        x_fp8.view(torch.uint8),
        scale_inv,
        scale_inv.stride(0),
        scale_inv.stride(1),
        words,
        scale_inv_t,
        num_rows,
        num_cols,
        EVEN=is_even(num_rows, num_cols, _TILE_QUARTER),
        WORDS=words.dtype == torch.int32,
        IS_E4M3=x_fp8.dtype == torch.float8_e4m3fn,
        PTX=runs_ptx(x_fp8),
        num_warps=WARPS["tile"],
    )
    return x_fp8_t, scale_inv_t


def block_amax(x: Tensor, start: int, num_rows: int, num_cols: int, block_rows: int) -> Tensor:
    """Triton version of `reference.block_amax`; it reads only tiles that hold a part of the shard."""
    x = x.contiguous()
    square = block_rows > 1
    amax = x.new_zeros((-(-num_rows // block_rows), num_blocks(num_cols)), dtype=torch.float32)
    tile_rows = BLOCK if square else _AMAX_ROWS
    first_tile = start // num_cols // tile_rows
    last_tile = (start + x.numel() - 1) // num_cols // tile_rows
    is_whole = x.numel() == num_rows * num_cols
    block_amax_kernel[((last_tile - first_tile + 1) * num_blocks(num_cols),)](
        x,
        start,
        x.numel(),
        first_tile,
        amax,
        num_cols,
        EVEN=is_whole and is_even(num_rows, num_cols, tile_rows // 4),
        SQUARE=square,
        ROWS=tile_rows,
        num_warps=WARPS["amax"],
    )
    return amax


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """Triton version of `reference.dequantize_groupwise`."""
    num_rows, num_cols = x_fp8.shape
    x = torch.empty_like(x_fp8, dtype=torch.bfloat16)
    launch(
        dequantize_kernel,
        ceil_div(num_rows, DEQUANTIZE_ROWS) * num_blocks(num_cols),
        x_fp8.view(torch.uint8),
        scale_inv,
        scale_inv.stride(0),
        scale_inv.stride(1),
        x,
        num_rows,
        num_cols,
        ROWS=DEQUANTIZE_ROWS,
        EVEN=num_rows % DEQUANTIZE_ROWS == 0 and num_cols % BLOCK == 0,
        PTX=runs_ptx(x),
        num_warps=WARPS["dequantize"],
    )
    return x
