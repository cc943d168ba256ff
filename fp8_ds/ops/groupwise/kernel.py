"""The device code of `groupwise.triton`; the same bits as `reference`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import decode
from fp8_ds.ops._producer_device import to_bf16
from fp8_ds.ops.blockwise.reference import BLOCK

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
    """ROWS rows of one group. Args: x_fp8 as bytes, x bf16, both contiguous. EVEN: no tile is ragged."""
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
