"""Device code of SwiGLU's transposed result, alone or beside the gradients: the arithmetic of `kernel`, the tiles of
ops/_tiles.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._device import (
    AMAX,
    FROM_AMAX,
    GIVEN,
    INFINITY,
    bits_of_largest,
    decode,
    encode_four,
    larger,
    magnitude,
    quantize,
    record_amax,
    scale_from_amax,
    to_bf16,
    to_float,
)
from fp8_ds.ops._tiles import TILE_COLS, load_rows, store_rows, store_transposed, tile_corner, tile_masks
from fp8_ds.ops.blockwise import BLOCK
from fp8_ds.ops.swiglu.kernel import gradients, hidden

assert BLOCK == TILE_COLS, "a row of a tile has one scale"

_E4M3_MAX = tl.constexpr(E4M3.max)
_COLS = tl.constexpr(TILE_COLS)
_LARGEST = tl.constexpr("""{
.reg .b32 a, b;
max.NaN.xorsign.abs.bf16x2 a, $2, $4;
max.NaN.xorsign.abs.bf16x2 b, $6, $8;
max.NaN.xorsign.abs.bf16x2 $0, a, b;
max.NaN.xorsign.abs.bf16x2 a, $3, $5;
max.NaN.xorsign.abs.bf16x2 b, $7, $9;
max.NaN.xorsign.abs.bf16x2 $1, a, b;
}""")
"""Largest magnitudes; the signs of the results mean nothing."""


@triton.jit
def _scale(scale, scale_inv, amax, MODE: tl.constexpr, FP8_MAX: tl.constexpr):
    """Return the scale: given, or from the amax of all, whose inverse the first program stores."""
    if MODE == FROM_AMAX:
        factor, inverse = scale_from_amax(magnitude(tl.load(amax)), FP8_MAX)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, inverse)
    else:
        factor = tl.load(scale)
    return factor


@triton.jit
def _word(y0, y1, y2, y3, factor, FP8_MAX: tl.constexpr, PTX: tl.constexpr):
    """Encode four bf16 tensors times `factor` as the bytes of one int32 each."""
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    y0, y1 = to_float(y0, PTX) * factor, to_float(y1, PTX) * factor
    y2, y3 = to_float(y2, PTX) * factor, to_float(y3, PTX) * factor
    return encode_four(y0, y1, y2, y3, IS_E4M3, PTX)


@triton.jit
def _largest(y0, y1, y2, y3, PTX: tl.constexpr):
    """Return the bits of the amax of four bf16 tensors."""
    if PTX:
        args = [y0, y1, y2, y3]
        largest = tl.inline_asm_elementwise(_LARGEST, "=r,=r,r,r,r,r,r,r,r,r", args, tl.int16, is_pure=True, pack=4)
    else:
        largest = larger(larger(larger(y0.to(tl.int16, bitcast=True) & 0x7FFF, y1, PTX), y2, PTX), y3, PTX)
    return bits_of_largest(largest & 0x7FFF)


@triton.jit
def _factor_rows(
    x, scale_inv, rows, cols, stride, scale_stride, mask, left, KEPT: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Load bf16 of one of a tile's four tensors. KEPT: from codes, with a scale for each row; `left` rows exist."""
    value = load_rows(x, rows, cols, stride, mask, EVEN)
    if KEPT:
        at = scale_inv + rows * scale_stride
        inverse = tl.load(at) if EVEN else tl.load(at, rows < left, 0.0)
        value = to_bf16(decode(value, True, PTX) * inverse[:, None], PTX)
    return value


@triton.jit
def _note(amax, scale_inv, largest, MODE: tl.constexpr, RECORD: tl.constexpr):
    """Take the amax of a tile into that of all; with a given scale, one that is not finite makes scale_inv NaN."""
    if MODE == AMAX or RECORD:
        record_amax(amax, largest)
    if MODE == GIVEN:
        tl.store(scale_inv, float("nan"), largest >= INFINITY)


@triton.jit
def _product(gate, up, rows, cols, gate_stride, up_stride, mask, EVEN: tl.constexpr, PTX: tl.constexpr):
    """Compute the product, bf16, of one of a tile's four tensors; `gate` and `up` point at the tile's corner."""
    g = load_rows(gate, rows, cols, gate_stride, mask, EVEN)
    return hidden(g, load_rows(up, rows, cols, up_stride, mask, EVEN), PTX)


@triton.jit
def _kept_rows(
    codes, scale_inv, NUMBER: tl.constexpr, rows, cols, stride, scale_stride, mask, left, EVEN: tl.constexpr
):  # fmt: skip
    """Load the tile's tensor NUMBER of codes, and its rows' scales; `left` of the tile's rows exist.

    NUMBER is added to the pointer, which is the same in all threads: in `rows` each thread would compute it.
    """
    at = scale_inv + NUMBER * scale_stride + rows * scale_stride
    inverse = tl.load(at) if EVEN else tl.load(at, rows + NUMBER < left, 0.0)
    return load_rows(codes + NUMBER * stride, rows, cols, stride, mask, EVEN), inverse


@triton.jit
def _product_of_kept(gate, gate_inverse, up, up_inverse, PTX: tl.constexpr):
    """Compute the product, bf16, of one of a tile's four tensors of codes, with a scale for each row."""
    g = to_bf16(decode(gate, True, PTX) * gate_inverse[:, None], PTX)
    u = to_bf16(decode(up, True, PTX) * up_inverse[:, None], PTX)
    return hidden(g, u, PTX)


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax", "gate_kept", "up_kept"])
def swiglu_columns_kernel(
    gate, up, gate_kept, up_kept, columns, scale, scale_inv, amax, num_rows, num_cols, gate_stride, up_stride,
    kept_stride, kept_group_stride,
    MODE: tl.constexpr, KEPT: tl.constexpr, FP8_MAX: tl.constexpr, QUARTER: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute only the transpose of `silu(gate) * up`. MODE GIVEN: a product that is not finite makes scale_inv NaN;
    nothing is recorded. KEPT: gate and up are codes, their scales `gate_kept` and `up_kept`."""
    first_row, first_col = tile_corner(num_cols, QUARTER)
    rows, cols, mask0, mask1, mask2, mask3 = tile_masks(first_row, first_col, num_rows, num_cols, QUARTER)
    row = first_row.to(tl.int64)
    gate += row * gate_stride + first_col
    up += row * up_stride + first_col
    factor = 1.0
    if KEPT:
        left = num_rows - first_row
        gate_kept += row * kept_stride + first_col // _COLS * kept_group_stride
        up_kept += row * kept_stride + first_col // _COLS * kept_group_stride
        g0, s0 = _kept_rows(gate, gate_kept, 0, rows, cols, gate_stride, kept_stride, mask0, left, EVEN)
        u0, v0 = _kept_rows(up, up_kept, 0, rows, cols, up_stride, kept_stride, mask0, left, EVEN)
        g1, s1 = _kept_rows(gate, gate_kept, 1, rows, cols, gate_stride, kept_stride, mask1, left, EVEN)
        u1, v1 = _kept_rows(up, up_kept, 1, rows, cols, up_stride, kept_stride, mask1, left, EVEN)
        g2, s2 = _kept_rows(gate, gate_kept, 2, rows, cols, gate_stride, kept_stride, mask2, left, EVEN)
        u2, v2 = _kept_rows(up, up_kept, 2, rows, cols, up_stride, kept_stride, mask2, left, EVEN)
        g3, s3 = _kept_rows(gate, gate_kept, 3, rows, cols, gate_stride, kept_stride, mask3, left, EVEN)
        u3, v3 = _kept_rows(up, up_kept, 3, rows, cols, up_stride, kept_stride, mask3, left, EVEN)
        if MODE != AMAX:
            factor = _scale(scale, scale_inv, amax, MODE, FP8_MAX)
        if PTX:
            tl.debug_barrier()  # else ptxas puts some of these loads off until others have arrived
        h0 = _product_of_kept(g0, s0, u0, v0, PTX)
        h1 = _product_of_kept(g1, s1, u1, v1, PTX)
        h2 = _product_of_kept(g2, s2, u2, v2, PTX)
        h3 = _product_of_kept(g3, s3, u3, v3, PTX)
    else:
        h0 = _product(gate, up, rows, cols, gate_stride, up_stride, mask0, EVEN, PTX)
        h1 = _product(gate, up, rows + 1, cols, gate_stride, up_stride, mask1, EVEN, PTX)
        h2 = _product(gate, up, rows + 2, cols, gate_stride, up_stride, mask2, EVEN, PTX)
        h3 = _product(gate, up, rows + 3, cols, gate_stride, up_stride, mask3, EVEN, PTX)
        if MODE != AMAX:
            factor = _scale(scale, scale_inv, amax, MODE, FP8_MAX)
    if MODE != AMAX:
        word = _word(h0, h1, h2, h3, factor, FP8_MAX, PTX)
        store_transposed(word, columns, first_row, first_col, num_rows, num_cols, EVEN, WORDS)
    if MODE != FROM_AMAX:  # what is not finite is looked for when the columns are on their way
        _note(amax, scale_inv, _largest(h0, h1, h2, h3, PTX), MODE, False)


@triton.jit
def _quarter_of_all(
    grad_hidden, gate, up, gate_kept, up_kept, gate_fp8, up_fp8, gate_factor, up_factor, gate_largest, up_largest, rows,
    cols, num_cols, grad_stride, gate_stride, up_stride, kept_stride, mask, left,
    MODE: tl.constexpr, KEPT: tl.constexpr, GRAD_MAX: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute the product, bf16, in one of a tile's four tensors (KEPT: in the first pass of tensorwise), with the
    largest gradients so far; the gradients are stored."""
    g = _factor_rows(gate, gate_kept, rows, cols, gate_stride, kept_stride, mask, left, KEPT, EVEN, PTX)
    u = _factor_rows(up, up_kept, rows, cols, up_stride, kept_stride, mask, left, KEPT, EVEN, PTX)
    grad = load_rows(grad_hidden, rows, cols, grad_stride, mask, EVEN)
    grad_gate, grad_up = gradients(grad, g, u, PTX)
    if MODE != FROM_AMAX:
        gate_largest = larger(gate_largest, grad_gate, PTX)
        up_largest = larger(up_largest, grad_up, PTX)
    if MODE != AMAX:
        store_rows(gate_fp8, rows, cols, num_cols, quantize(grad_gate, gate_factor, GRAD_MAX, PTX), mask, EVEN)
        store_rows(up_fp8, rows, cols, num_cols, quantize(grad_up, up_factor, GRAD_MAX, PTX), mask, EVEN)
    return grad_up if KEPT and MODE != AMAX else hidden(g, u, PTX), gate_largest, up_largest


@triton.jit(
    do_not_specialize_on_alignment=[
        "scale", "scale_inv", "amax", "gate_scale", "gate_scale_inv", "gate_amax", "up_scale", "up_scale_inv",
        "up_amax", "gate_kept", "up_kept",
    ]
)  # fmt: skip
def swiglu_backward_and_columns_kernel(
    grad_hidden, gate, up, gate_kept, up_kept, columns, gate_fp8, up_fp8, scale, scale_inv, amax, gate_scale,
    gate_scale_inv, gate_amax, up_scale, up_scale_inv, up_amax, num_rows, num_cols, grad_stride, gate_stride, up_stride,
    kept_stride, kept_group_stride,
    MODE: tl.constexpr, MEASURES: tl.constexpr, KEPT: tl.constexpr,
    FP8_MAX: tl.constexpr, GRAD_MAX: tl.constexpr, QUARTER: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute rows of the gradients of gate and up and, unless KEPT, the product's transpose, in one read.

    MEASURES: the first pass of tensorwise also finds the amax of the product, KEPT or not. KEPT: as above.
    """
    first_row, first_col = tile_corner(num_cols, QUARTER)
    rows, cols, mask0, mask1, mask2, mask3 = tile_masks(first_row, first_col, num_rows, num_cols, QUARTER)
    row = first_row.to(tl.int64)
    grad_hidden += row * grad_stride + first_col
    gate += row * gate_stride + first_col
    up += row * up_stride + first_col
    kept_at = row * kept_stride + first_col // _COLS * kept_group_stride
    gate_kept += kept_at
    up_kept += kept_at
    corner = row * num_cols + first_col
    gate_fp8 += corner
    up_fp8 += corner
    left = num_rows - first_row
    factor, gate_factor, up_factor = 1.0, 1.0, 1.0
    if MODE != AMAX:
        if not KEPT:
            factor = _scale(scale, scale_inv, amax, MODE, FP8_MAX)
        gate_factor = _scale(gate_scale, gate_scale_inv, gate_amax, MODE, GRAD_MAX)
        up_factor = _scale(up_scale, up_scale_inv, up_amax, MODE, GRAD_MAX)
    gate_largest = tl.zeros([QUARTER, _COLS], tl.int16)
    up_largest = tl.zeros([QUARTER, _COLS], tl.int16)
    h0, gate_largest, up_largest = _quarter_of_all(
        grad_hidden, gate, up, gate_kept, up_kept, gate_fp8, up_fp8, gate_factor, up_factor, gate_largest, up_largest,
        rows, cols, num_cols, grad_stride, gate_stride, up_stride, kept_stride, mask0, left,
        MODE, KEPT, GRAD_MAX, EVEN, PTX,
    )  # fmt: skip
    h1, gate_largest, up_largest = _quarter_of_all(
        grad_hidden, gate, up, gate_kept, up_kept, gate_fp8, up_fp8, gate_factor, up_factor, gate_largest, up_largest,
        rows + 1, cols, num_cols, grad_stride, gate_stride, up_stride, kept_stride, mask1, left,
        MODE, KEPT, GRAD_MAX, EVEN, PTX,
    )  # fmt: skip
    h2, gate_largest, up_largest = _quarter_of_all(
        grad_hidden, gate, up, gate_kept, up_kept, gate_fp8, up_fp8, gate_factor, up_factor, gate_largest, up_largest,
        rows + 2, cols, num_cols, grad_stride, gate_stride, up_stride, kept_stride, mask2, left,
        MODE, KEPT, GRAD_MAX, EVEN, PTX,
    )  # fmt: skip
    h3, gate_largest, up_largest = _quarter_of_all(
        grad_hidden, gate, up, gate_kept, up_kept, gate_fp8, up_fp8, gate_factor, up_factor, gate_largest, up_largest,
        rows + 3, cols, num_cols, grad_stride, gate_stride, up_stride, kept_stride, mask3, left,
        MODE, KEPT, GRAD_MAX, EVEN, PTX,
    )  # fmt: skip
    if MODE != FROM_AMAX:
        _note(gate_amax, gate_scale_inv, bits_of_largest(gate_largest), MODE, True)
        _note(up_amax, up_scale_inv, bits_of_largest(up_largest), MODE, True)
        if (MODE == AMAX and MEASURES) or (MODE == GIVEN and not KEPT):
            _note(amax, scale_inv, _largest(h0, h1, h2, h3, PTX), MODE, False)
    if not KEPT and MODE != AMAX:
        word = _word(h0, h1, h2, h3, factor, FP8_MAX, PTX)
        store_transposed(word, columns, first_row, first_col, num_rows, num_cols, EVEN, WORDS)
