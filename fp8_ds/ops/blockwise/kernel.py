"""Device code of `triton`; the same bits as `reference`. ops/_tiles.py has the tiles, and how they are transposed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import INFINITY, NAN, decode, encode_bytes, encode_four, magnitude, to_bf16
from fp8_ds.ops._tiles import load_rows, store_transposed
from fp8_ds.ops.blockwise.reference import BLOCK, MAX_EXPONENT

_BLOCK = tl.constexpr(BLOCK)
_MAX_BIASED = tl.constexpr(MAX_EXPONENT + 127)
_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}

_STORE_SCALE = tl.constexpr("""{
.reg .pred inside;
setp.ne.b32 inside, $3, 0;
@inside st.global.f32 [$1], $2;
mov.b32 $0, 0;
}""")


@triton.jit
def _scales(amax, MAX_BITS: tl.constexpr):
    """Compute `reference.scale_from_amax` by integers, of the bits of amaxes. MAX_BITS: fp8_max's bits as a float32.

    The difference of two floats' bits, shifted, is the difference of their exponents, one less where the mantissa of
    amax is the larger.
    """
    biased = tl.minimum(127 + ((MAX_BITS - amax) >> 23), _MAX_BIASED)
    biased = tl.where((amax == 0) | (amax >= INFINITY), 127, biased)
    scale_inv = tl.where(amax >= INFINITY, NAN, (254 - biased) << 23)
    return (biased << 23).to(tl.float32, bitcast=True), scale_inv.to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(at, scale_inv, mask, PTX: tl.constexpr):
    """Store the scale by all threads that hold the row: tl.store would pass it through shared memory."""
    if PTX:
        inside = mask.to(tl.int32)
        args = [at.to(tl.int64), scale_inv, inside]
        tl.inline_asm_elementwise(_STORE_SCALE, "=r,l,f,r", args, tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at, scale_inv, mask)


@triton.jit
def quantize_kernel(
    x,
    stride,
    x_fp8,
    scale_inv,
    x_fp8_t,
    scale_inv_t,
    num_rows,
    num_cols,
    SQUARE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    QUARTER: tl.constexpr,
    MAX_BITS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantize one tile from one read of it. QUARTER is 32 unless only rows with 1x128 blocks are made.

    Args: x [num_rows, num_cols] with rows `stride` apart; outputs as `BlockwiseQuantized`, x_fp8 as bytes, x_fp8_t as
        words if WORDS, else bytes; those of a layout not made are None. EVEN: no tile is ragged.
    """
    col_tiles = tl.cdiv(num_cols, _BLOCK)
    row_tile = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    first_row = row_tile * (4 * QUARTER)
    first_col = col_tile * _BLOCK
    rows = tl.arange(0, QUARTER) * 4
    cols = tl.arange(0, _BLOCK)
    left = num_rows - first_row
    in_cols = (cols < num_cols - first_col)[None, :]
    mask0 = (rows < left)[:, None] & in_cols
    mask1 = (rows + 1 < left)[:, None] & in_cols
    mask2 = (rows + 2 < left)[:, None] & in_cols
    mask3 = (rows + 3 < left)[:, None] & in_cols
    corner = x + first_row.to(tl.int64) * stride + first_col
    x0 = load_rows(corner, rows, cols, stride, mask0, EVEN)
    x1 = load_rows(corner, rows + 1, cols, stride, mask1, EVEN)
    x2 = load_rows(corner, rows + 2, cols, stride, mask2, EVEN)
    x3 = load_rows(corner, rows + 3, cols, stride, mask3, EVEN)
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    mag0, mag1, mag2, mag3 = magnitude(x0), magnitude(x1), magnitude(x2), magnitude(x3)

    if SQUARE or COL:
        of_cols = tl.max(tl.maximum(tl.maximum(mag0, mag1), tl.maximum(mag2, mag3)), 0)
    if SQUARE:
        scale, inverse = _scales(tl.max(of_cols, 0), MAX_BITS)
        if ROW:
            tl.store(scale_inv + row_tile * col_tiles + col_tile, inverse)
        if COL:
            tl.store(scale_inv_t + col_tile * tl.cdiv(num_rows, _BLOCK) + row_tile, inverse)
    elif COL:
        col_scale, inverse = _scales(of_cols, MAX_BITS)
        col_scale = col_scale[None, :]
        at = scale_inv_t + row_tile.to(tl.int64) * num_cols + first_col + cols
        tl.store(at, inverse, None if EVEN else cols < num_cols - first_col)

    if ROW:
        if SQUARE:
            scale0, scale1, scale2, scale3 = scale, scale, scale, scale
        else:
            scale0, inverse0 = _scales(tl.max(mag0, 1), MAX_BITS)
            scale1, inverse1 = _scales(tl.max(mag1, 1), MAX_BITS)
            scale2, inverse2 = _scales(tl.max(mag2, 1), MAX_BITS)
            scale3, inverse3 = _scales(tl.max(mag3, 1), MAX_BITS)
            scale0, scale1, scale2, scale3 = scale0[:, None], scale1[:, None], scale2[:, None], scale3[:, None]
            at = scale_inv + col_tile.to(tl.int64) * num_rows + first_row + rows
            _store_scale(at, inverse0, rows < left, PTX)
            _store_scale(at + 1, inverse1, rows + 1 < left, PTX)
            _store_scale(at + 2, inverse2, rows + 2 < left, PTX)
            _store_scale(at + 3, inverse3, rows + 3 < left, PTX)
        at = x_fp8 + first_row.to(tl.int64) * num_cols + first_col + rows[:, None] * num_cols + cols[None, :]
        tl.store(at, encode_bytes(x0 * scale0, IS_E4M3, PTX), None if EVEN else mask0)
        tl.store(at + num_cols, encode_bytes(x1 * scale1, IS_E4M3, PTX), None if EVEN else mask1)
        tl.store(at + 2 * num_cols, encode_bytes(x2 * scale2, IS_E4M3, PTX), None if EVEN else mask2)
        tl.store(at + 3 * num_cols, encode_bytes(x3 * scale3, IS_E4M3, PTX), None if EVEN else mask3)

    if COL:
        s = scale if SQUARE else col_scale
        word = encode_four(x0 * s, x1 * s, x2 * s, x3 * s, IS_E4M3, PTX)
        store_transposed(word, x_fp8_t, first_row, first_col, num_rows, num_cols, EVEN, WORDS)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _occupied_scale(code, scale_inv, PTX: tl.constexpr):
    """Return the bits of a row block's scale_inv; 0 if the block is all zeros and its scale_inv is a number."""
    bits = scale_inv.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if PTX:  # three operands an instruction; the interpreter folds with a function element by element
        largest = tl.reduce(code.to(tl.int32), 1, _or) & 0x7F
    else:
        largest = tl.max((code & 0x7F).to(tl.int32), 1)
    return tl.where((largest == 0) & (bits <= INFINITY), 0, bits)


@triton.jit
def _ratio(scale_inv, new):
    """Return scale_inv / new of powers of two, from their exponents' difference; a quotient below 2**-126 is 0.

    It is at most 1: a block of zeros is one whatever its scale. It is 1 where new is NaN: a poisoned tile keeps its
    codes.
    """
    new = new.to(tl.int32, bitcast=True)
    biased = 127 + (((scale_inv.to(tl.int32, bitcast=True) & 0x7FFFFFFF) - new) >> 23)
    biased = tl.where(new > INFINITY, 127, tl.minimum(tl.maximum(biased, 0), 127))
    return (biased << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def transpose_kernel(
    x_fp8,
    scale_inv,
    scale_row_stride,
    scale_col_stride,
    x_fp8_t,
    scale_inv_t,
    num_rows,
    num_cols,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Transpose one 128x128 tile. Args: x_fp8 [num_rows, num_cols] bytes; the rest as in `quantize_kernel`."""
    col_tiles = tl.cdiv(num_cols, _BLOCK)
    row_tile = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    first_row = row_tile * _BLOCK
    first_col = col_tile * _BLOCK
    rows = tl.arange(0, _BLOCK // 4) * 4
    cols = tl.arange(0, _BLOCK)
    left = num_rows - first_row
    in_cols = (cols < num_cols - first_col)[None, :]
    corner = x_fp8 + first_row.to(tl.int64) * num_cols + first_col
    x0 = load_rows(corner, rows, cols, num_cols, (rows < left)[:, None] & in_cols, EVEN)
    x1 = load_rows(corner, rows + 1, cols, num_cols, (rows + 1 < left)[:, None] & in_cols, EVEN)
    x2 = load_rows(corner, rows + 2, cols, num_cols, (rows + 2 < left)[:, None] & in_cols, EVEN)
    x3 = load_rows(corner, rows + 3, cols, num_cols, (rows + 3 < left)[:, None] & in_cols, EVEN)
    at = scale_inv + first_row.to(tl.int64) * scale_row_stride + col_tile.to(tl.int64) * scale_col_stride
    at += rows * scale_row_stride
    scale0 = tl.load(at, rows < left, 0.0)
    scale1 = tl.load(at + scale_row_stride, rows + 1 < left, 0.0)
    scale2 = tl.load(at + 2 * scale_row_stride, rows + 2 < left, 0.0)
    scale3 = tl.load(at + 3 * scale_row_stride, rows + 3 < left, 0.0)

    largest = tl.maximum(
        tl.maximum(_occupied_scale(x0, scale0, PTX), _occupied_scale(x1, scale1, PTX)),
        tl.maximum(_occupied_scale(x2, scale2, PTX), _occupied_scale(x3, scale3, PTX)),
    )
    new = tl.max(largest, 0)
    new = tl.where(new > INFINITY, NAN, tl.where(new == 0, 0x3F800000, new)).to(tl.float32, bitcast=True)
    at = scale_inv_t + row_tile.to(tl.int64) * num_cols + first_col + cols
    tl.store(at, tl.zeros([_BLOCK], tl.float32) + new, None if EVEN else cols < num_cols - first_col)

    word = encode_four(
        decode(x0, IS_E4M3, PTX) * _ratio(scale0, new),
        decode(x1, IS_E4M3, PTX) * _ratio(scale1, new),
        decode(x2, IS_E4M3, PTX) * _ratio(scale2, new),
        decode(x3, IS_E4M3, PTX) * _ratio(scale3, new),
        IS_E4M3,
        PTX,
    )
    store_transposed(word, x_fp8_t, first_row, first_col, num_rows, num_cols, EVEN, WORDS)


@triton.jit(do_not_specialize=["first_tile"])
def block_amax_kernel(
    x, start, numel, first_tile, amax, num_cols, EVEN: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr
):
    """Find amaxes of a tile of ROWS rows of a [*, num_cols] matrix; x holds its elements [start, start + numel).

    Args: first_tile: row of tiles that program 0 works on. EVEN: all the tile's elements are in x.
    """
    col_tiles = tl.cdiv(num_cols, _BLOCK)
    row_tile = first_tile + tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, _BLOCK)
    # Of the tile's corner, counted from the shard's first element: before it where negative.
    origin = row_tile.to(tl.int64) * ROWS * num_cols + col_tile * _BLOCK - start
    local = rows[:, None] * num_cols + cols[None, :]
    if EVEN:
        value = tl.load(x + origin + local)
    else:
        reach = ROWS * num_cols
        low = tl.minimum(tl.maximum(-origin, 0), reach).to(tl.int32)
        high = tl.minimum(tl.maximum(numel - origin, 0), reach).to(tl.int32)
        in_cols = (cols < num_cols - col_tile * _BLOCK)[None, :]
        value = tl.load(x + origin + local, (local >= low) & (local < high) & in_cols, 0.0)
    largest = tl.max(magnitude(value.to(tl.float32)), 1)
    if SQUARE:
        bits = tl.max(largest, 0)
        bits = tl.where(bits > INFINITY, NAN, bits)
        tl.store(amax + row_tile * col_tiles + col_tile, bits.to(tl.float32, bitcast=True))
    else:
        bits = tl.where(largest > INFINITY, NAN, largest)
        at = amax + (row_tile.to(tl.int64) * ROWS + rows) * col_tiles + col_tile
        # Rows that lie past the shard are past the matrix, or 0 in it already.
        inside = origin + rows * num_cols < numel
        tl.store(at, bits.to(tl.float32, bitcast=True), None if EVEN else inside)


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
