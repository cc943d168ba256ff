"""Dequantisation by groups in one launch of a Triton kernel; the same bits as `reference`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import decode
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops._producer_device import to_bf16
from fp8_ds.ops.blockwise import num_blocks
from fp8_ds.ops.blockwise.reference import BLOCK
from fp8_ds.ops.transpose.triton import runs_ptx

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def dequantize_kernel(
    x_fp8,
    scale_inv,
    scale_row_stride,
    scale_col_stride,
    x,
    num_rows,
    num_cols,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
):
    """Dequantize ROWS rows of one group. Args: x_fp8 as bytes, x bf16, both contiguous. EVEN: no tile is ragged."""
    groups = tl.cdiv(num_cols, _BLOCK)
    first_row = tl.program_id(0) // groups * ROWS
    group = tl.program_id(0) % groups
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, _BLOCK)
    in_rows = rows < num_rows - first_row
    mask = None if EVEN else in_rows[:, None] & (cols < num_cols - group * _BLOCK)[None, :]
    corner = first_row.to(tl.int64) * num_cols + group * _BLOCK
    local = rows[:, None] * num_cols + cols[None, :]
    at = scale_inv + first_row.to(tl.int64) * scale_row_stride + group.to(tl.int64) * scale_col_stride
    scale = tl.load(at + rows * scale_row_stride, None if EVEN else in_rows)
    value = decode(tl.load(x_fp8 + corner + local, mask), True, PTX) * scale[:, None]
    tl.store(x + corner + local, to_bf16(value, PTX), mask)


_ROWS, _NUM_WARPS = 32, 4
"""32 elements a thread: two vectors of 16 codes."""


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """Triton version of `reference.dequantize_groupwise`; on CUDA, or on CPU under Triton's interpreter."""
    num_rows, num_cols = x_fp8.shape
    x = torch.empty_like(x_fp8, dtype=torch.bfloat16)
    launch(
        dequantize_kernel,
        ceil_div(num_rows, _ROWS) * num_blocks(num_cols),
        x_fp8.view(torch.uint8),
        scale_inv,
        scale_inv.stride(0),
        scale_inv.stride(1),
        x,
        num_rows,
        num_cols,
        ROWS=_ROWS,
        EVEN=num_rows % _ROWS == 0 and num_cols % BLOCK == 0,
        PTX=runs_ptx(x),
        num_warps=_NUM_WARPS,
    )
    return x
