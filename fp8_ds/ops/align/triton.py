"""The shift and the transpose in one read: `ops/transpose/triton.py` with codes decoded, scaled and encoded between."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import decode, encode_four, runs_ptx
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops.align import ratios
from fp8_ds.ops.transpose.triton import (
    NUM_WARPS,
    VECTORS,
    WORDS,
    load_word,
    store_columns,
    transpose_words,
)


@triton.jit
def _shifted(word, ratio, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Multiply the four codes in a word by `ratio`."""
    x0 = decode((word & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x1 = decode(((word >> 8) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x2 = decode(((word >> 16) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    x3 = decode(((word >> 24) & 0xFF).to(tl.uint8), IS_E4M3, PTX) * ratio
    return encode_four(x0, x1, x2, x3, IS_E4M3, PTX)


@triton.jit
def _ratio_of(ratio, scale_inv, largest, row, num_rows, rows_per_scale, GIVEN: tl.constexpr):
    """Return the ratios of some rows: given, or as `ops.align.ratios` computes them."""
    if GIVEN:
        return tl.load(ratio + row, row < num_rows, 0.0)
    own = tl.load(scale_inv + row // rows_per_scale, row < num_rows, 0.0)
    return tl.where(largest == 0.0, 0.0, tl.div_rn(own, tl.zeros_like(own) + largest))


@triton.jit
def _four_rows(
    x, ratio, scale_inv, largest, row, first_col, num_rows, num_cols, rows_per_scale,
    WORDS: tl.constexpr, VECTOR: tl.constexpr, GIVEN: tl.constexpr, IS_E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Load rows `row` to `row + 3`, shifted and transposed by 4 x 4."""
    word = tl.arange(0, WORDS)[None, :]
    left = num_cols - first_col
    at = x + first_col + row.to(tl.int64) * num_cols
    a = load_word(at, word, tl.where(row < num_rows, left, 0), VECTOR)
    b = load_word(at + num_cols, word, tl.where(row + 1 < num_rows, left, 0), VECTOR)
    c = load_word(at + 2 * num_cols, word, tl.where(row + 2 < num_rows, left, 0), VECTOR)
    d = load_word(at + 3 * num_cols, word, tl.where(row + 3 < num_rows, left, 0), VECTOR)
    a = _shifted(a, _ratio_of(ratio, scale_inv, largest, row, num_rows, rows_per_scale, GIVEN), IS_E4M3, PTX)
    b = _shifted(b, _ratio_of(ratio, scale_inv, largest, row + 1, num_rows, rows_per_scale, GIVEN), IS_E4M3, PTX)
    c = _shifted(c, _ratio_of(ratio, scale_inv, largest, row + 2, num_rows, rows_per_scale, GIVEN), IS_E4M3, PTX)
    d = _shifted(d, _ratio_of(ratio, scale_inv, largest, row + 3, num_rows, rows_per_scale, GIVEN), IS_E4M3, PTX)
    return transpose_words(a, b, c, d, PTX)


@triton.jit
def align_kernel(
    x, out_t, ratio, scale_inv, out_largest, num_rows, num_cols, rows_per_scale, num_scales,
    VECTORS: tl.constexpr, WORDS: tl.constexpr, VECTOR_IN: tl.constexpr, VECTOR_OUT: tl.constexpr,
    SCALES: tl.constexpr, GIVEN: tl.constexpr, IS_E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Shift and transpose uint8 [num_rows, num_cols] to uint8 [num_cols, num_rows]; tiles as in the transpose.

    GIVEN: float32 ratio [num_rows]. Otherwise each program finds the largest of float32 scale_inv [num_scales].
    """
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_row = tl.program_id(0) // tiles_per_row * (VECTORS * 16)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    row = first_row + tl.arange(0, VECTORS)[:, None] * 16
    largest = 0.0
    if not GIVEN:
        index = tl.arange(0, SCALES)
        scales = tl.load(scale_inv + index, index < num_scales, 0.0)
        is_nan = tl.max((scales != scales).to(tl.int32), 0) > 0  # which a maximum passes over
        largest = tl.where(is_nan, float("nan"), tl.max(tl.where(scales != scales, 0.0, scales), 0))
        if tl.program_id(0) == 0:
            tl.store(out_largest, largest)
    a0, a1, a2, a3 = _four_rows(
        x, ratio, scale_inv, largest, row, first_col, num_rows, num_cols, rows_per_scale, WORDS, VECTOR_IN, GIVEN,
        IS_E4M3, PTX,
    )  # fmt: skip
    b0, b1, b2, b3 = _four_rows(
        x, ratio, scale_inv, largest, row + 4, first_col, num_rows, num_cols, rows_per_scale, WORDS, VECTOR_IN, GIVEN,
        IS_E4M3, PTX,
    )  # fmt: skip
    c0, c1, c2, c3 = _four_rows(
        x, ratio, scale_inv, largest, row + 8, first_col, num_rows, num_cols, rows_per_scale, WORDS, VECTOR_IN, GIVEN,
        IS_E4M3, PTX,
    )  # fmt: skip
    d0, d1, d2, d3 = _four_rows(
        x, ratio, scale_inv, largest, row + 12, first_col, num_rows, num_cols, rows_per_scale, WORDS, VECTOR_IN, GIVEN,
        IS_E4M3, PTX,
    )  # fmt: skip
    store_columns(
        out_t, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, num_rows, num_cols,
        VECTOR_OUT, PTX,
    )  # fmt: skip


_FEW = 16
"""Most scales of which the kernel itself finds the largest."""


def align(x_fp8: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Triton version of `align_reference`, except for the sign of NaN; one launch if the scales are few. `x_fp8` has
    elements; on CPU it needs Triton's interpreter."""
    if len(scale_inv) <= _FEW:
        largest = torch.empty((), dtype=torch.float32, device=x_fp8.device)
        return _launch(x_fp8, scale_inv, scale_inv, largest, is_given=False), largest
    ratio, largest = ratios(scale_inv)
    ratio = ratio.repeat_interleave(len(x_fp8) // len(ratio))
    return _launch(x_fp8, ratio, ratio, ratio, is_given=True), largest


def _launch(x_fp8: Tensor, ratio: Tensor, scale_inv: Tensor, largest: Tensor, *, is_given: bool) -> Tensor:
    num_rows, num_cols = x_fp8.shape
    out_t = torch.empty((num_cols, num_rows), dtype=x_fp8.dtype, device=x_fp8.device)
    num_programs = ceil_div(num_rows, VECTORS * 16) * ceil_div(num_cols, WORDS * 4)
    launch(
        align_kernel,
        num_programs,
        x_fp8.view(torch.uint8),
        out_t.view(torch.uint8),
        ratio,
        scale_inv,
        largest,
        num_rows,
        num_cols,
        num_rows // len(scale_inv),
        len(scale_inv),
        VECTORS=VECTORS,
        WORDS=WORDS,
        VECTOR_IN=num_cols % 16 == 0 and x_fp8.data_ptr() % 16 == 0,
        VECTOR_OUT=num_rows % 16 == 0,
        SCALES=1 if is_given else triton.next_power_of_2(len(scale_inv)),
        GIVEN=is_given,
        IS_E4M3=x_fp8.dtype == torch.float8_e4m3fn,
        PTX=runs_ptx(x_fp8),
        num_warps=NUM_WARPS,
    )
    return out_t
