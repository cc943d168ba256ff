"""The shift and the transpose in one read: `ops/transpose/triton.py` with codes decoded, scaled and encoded between."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import decode, encode_four
from fp8_ds.ops.transpose.triton import (
    NUM_WARPS,
    VECTORS,
    WORDS,
    load_word,
    runs_ptx,
    store_columns,
    transpose_words,
)


@triton.jit
def _shifted(word, ratio, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Four codes in a word, times `ratio`."""
    x0 = decode((word & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x1 = decode(((word >> 8) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x2 = decode(((word >> 16) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x3 = decode(((word >> 24) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    return encode_four(x0, x1, x2, x3, IS_E4M3, PTX)


@triton.jit
def _four_rows(
    x, ratio, row, first_col, num_rows, num_cols,
    WORDS: tl.constexpr, VECTOR: tl.constexpr, IS_E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `row + 3`, shifted, transposed by 4 x 4."""
    word = tl.arange(0, WORDS)[None, :]
    left = num_cols - first_col
    at = x + first_col + row.to(tl.int64) * num_cols
    a = load_word(at, word, tl.where(row < num_rows, left, 0), VECTOR)
    b = load_word(at + num_cols, word, tl.where(row + 1 < num_rows, left, 0), VECTOR)
    c = load_word(at + 2 * num_cols, word, tl.where(row + 2 < num_rows, left, 0), VECTOR)
    d = load_word(at + 3 * num_cols, word, tl.where(row + 3 < num_rows, left, 0), VECTOR)
    a = _shifted(a, tl.load(ratio + row, row < num_rows, 0.0), IS_E4M3, PTX)
    b = _shifted(b, tl.load(ratio + row + 1, row + 1 < num_rows, 0.0), IS_E4M3, PTX)
    c = _shifted(c, tl.load(ratio + row + 2, row + 2 < num_rows, 0.0), IS_E4M3, PTX)
    d = _shifted(d, tl.load(ratio + row + 3, row + 3 < num_rows, 0.0), IS_E4M3, PTX)
    return transpose_words(a, b, c, d, PTX)


@triton.jit
def align_kernel(
    x, out_t, ratio, num_rows, num_cols,
    VECTORS: tl.constexpr, WORDS: tl.constexpr, VECTOR_IN: tl.constexpr, VECTOR_OUT: tl.constexpr,
    IS_E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """uint8 [num_rows, num_cols] and float32 [num_rows] to uint8 [num_cols, num_rows]; tiles as in the transpose."""
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_row = tl.program_id(0) // tiles_per_row * (VECTORS * 16)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    row = first_row + tl.arange(0, VECTORS)[:, None] * 16
    a0, a1, a2, a3 = _four_rows(x, ratio, row, first_col, num_rows, num_cols, WORDS, VECTOR_IN, IS_E4M3, PTX)
    b0, b1, b2, b3 = _four_rows(x, ratio, row + 4, first_col, num_rows, num_cols, WORDS, VECTOR_IN, IS_E4M3, PTX)
    c0, c1, c2, c3 = _four_rows(x, ratio, row + 8, first_col, num_rows, num_cols, WORDS, VECTOR_IN, IS_E4M3, PTX)
    d0, d1, d2, d3 = _four_rows(x, ratio, row + 12, first_col, num_rows, num_cols, WORDS, VECTOR_IN, IS_E4M3, PTX)
    store_columns(
        out_t, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, num_rows, num_cols,
        VECTOR_OUT, PTX,
    )  # fmt: skip


def shift_transpose(x_fp8: Tensor, ratio: Tensor) -> Tensor:
    """As `reference.shift_transpose`, but for the sign of NaN; on CPU only under Triton's interpreter."""
    num_rows, num_cols = x_fp8.shape
    out_t = torch.empty((num_cols, num_rows), dtype=x_fp8.dtype, device=x_fp8.device)
    num_programs = triton.cdiv(num_rows, VECTORS * 16) * triton.cdiv(num_cols, WORDS * 4)
    align_kernel[(num_programs,)](
        x_fp8.view(torch.uint8),
        out_t.view(torch.uint8),
        ratio,
        num_rows,
        num_cols,
        VECTORS=VECTORS,
        WORDS=WORDS,
        VECTOR_IN=num_cols % 16 == 0 and x_fp8.data_ptr() % 16 == 0,
        VECTOR_OUT=num_rows % 16 == 0,
        IS_E4M3=x_fp8.dtype == torch.float8_e4m3fn,
        PTX=runs_ptx(x_fp8),
        num_warps=NUM_WARPS,
    )
    return out_t
