"""Device code of `triton` for both layouts of bf16 with 1x128 blocks, by words of two neighbouring elements.

Amaxes are those of pairs, an instruction for each two elements, and what waits for its scale takes two bytes of a
register, not four: all is loaded before anything is worked on. The same bits as `kernel.quantize_kernel`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import code_of, words_to_codes
from fp8_ds.ops.blockwise.kernel import _BLOCK, _scales, _store_scale

_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
"""Largest of magnitudes; the signs of the results mean nothing."""

_ROW_E4M3 = tl.constexpr(words_to_codes("$3", "$3", "$4", "$4"))
_ROW_E5M2 = tl.constexpr(_ROW_E4M3.value.replace("e4m3x2", "e5m2x2"))


def _half(out: int, scale: int, part: str) -> str:
    """Return one column of four words of two columns each, as the bytes of a word."""
    lines = [f"{part.replace('OUT', f'a{k}').replace('IN', f'${2 + k}')}\nmov.b32 y{k}, a{k};" for k in range(4)]
    lines += [f"mul.rn.f32 y{k}, y{k}, ${scale};" for k in range(4)]
    lines += [f"cvt.rn.satfinite.e4m3x2.f32 {name}, y{k + 1}, y{k};" for name, k in (("low", 0), ("high", 2))]
    return "\n".join([*lines, f"mov.b32 ${out}, {{low, high}};"])


_COLUMNS_E4M3 = tl.constexpr(
    "{\n.reg .b32 a<4>;\n.reg .f32 y<4>;\n.reg .b16 low, high;\n"
    + _half(0, 6, "shl.b32 OUT, IN, 16;")
    + "\n"
    + _half(1, 7, "and.b32 OUT, IN, 0xffff0000;")
    + "\n}"
)
_COLUMNS_E5M2 = tl.constexpr(_COLUMNS_E4M3.value.replace("e4m3x2", "e5m2x2"))


@triton.jit
def _larger_by_ptx(a, b):
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b, PTX: tl.constexpr):
    """Return the larger magnitude in each half of two words."""
    if PTX:
        return _larger_by_ptx(a, b)
    return tl.maximum(a & 0x7FFF, b & 0x7FFF) | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)


@triton.jit
def _largest(x, axis: tl.constexpr, PTX: tl.constexpr):
    """Return the bits, as float32, of the largest magnitudes of first and of second halves along an axis."""
    if PTX:
        found = tl.reduce(x, axis, _larger_by_ptx)
        return (found << 16) & 0x7FFFFFFF, found & 0x7FFF0000
    return tl.max((x << 16) & 0x7FFFFFFF, axis), tl.max(x & 0x7FFF0000, axis)


@triton.jit
def _low(x):
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(x):
    return (x & ~0xFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _row(x, x_fp8, scale_inv, MAX_BITS: tl.constexpr, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Quantize one of a tile's four tensors of words [32, 64], by a scale for each row, to codes of two and scales."""
    first, second = _largest(x, 1, PTX)
    scale, inverse = _scales(tl.maximum(first, second), MAX_BITS)
    _store_scale(scale_inv, inverse, tl.full(inverse.shape, True, tl.int1), PTX)
    scale = tl.zeros(x.shape, tl.float32) + scale[:, None]
    if PTX:
        TEXT: tl.constexpr = _ROW_E4M3 if IS_E4M3 else _ROW_E5M2
        codes = tl.inline_asm_elementwise(TEXT, "=r,r,r,f,f", [x, scale], tl.int16, is_pure=True, pack=2)
    else:
        codes = (code_of(_low(x) * scale, IS_E4M3) | (code_of(_high(x) * scale, IS_E4M3) << 8)).to(tl.int16)
    tl.store(x_fp8, codes)


@triton.jit
def _columns(x0, x1, x2, x3, even, odd, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Encode four rows as the bytes of a word, the even and the odd columns apart, which have scales of their own."""
    even = tl.zeros(x0.shape, tl.float32) + even[None, :]
    odd = tl.zeros(x0.shape, tl.float32) + odd[None, :]
    if PTX:
        TEXT: tl.constexpr = _COLUMNS_E4M3 if IS_E4M3 else _COLUMNS_E5M2
        args = [x0, x1, x2, x3, even, odd]
        return tl.inline_asm_elementwise(TEXT, "=&r,=&r,r,r,r,r,f,f", args, (tl.int32, tl.int32), is_pure=True, pack=1)
    first = code_of(_low(x0) * even, IS_E4M3) | (code_of(_low(x1) * even, IS_E4M3) << 8)
    first |= (code_of(_low(x2) * even, IS_E4M3) << 16) | (code_of(_low(x3) * even, IS_E4M3) << 24)
    second = code_of(_high(x0) * odd, IS_E4M3) | (code_of(_high(x1) * odd, IS_E4M3) << 8)
    second |= (code_of(_high(x2) * odd, IS_E4M3) << 16) | (code_of(_high(x3) * odd, IS_E4M3) << 24)
    return first, second


@triton.jit
def _column_scales(x0, x1, x2, x3, scale_inv_t, pairs, MAX_BITS: tl.constexpr, PTX: tl.constexpr):
    """Return the scales of a tile's even and of its odd columns, and store their inverses."""
    even, odd = _largest(_larger(_larger(x0, x1, PTX), _larger(x2, x3, PTX), PTX), 0, PTX)
    even, even_inverse = _scales(even, MAX_BITS)
    odd, odd_inverse = _scales(odd, MAX_BITS)
    tl.store(scale_inv_t + pairs * 2, even_inverse)
    tl.store(scale_inv_t + pairs * 2 + 1, odd_inverse)
    return even, odd


@triton.jit
def quantize_pairs_kernel(
    x,
    stride,
    x_fp8,
    scale_inv,
    x_fp8_t,
    scale_inv_t,
    num_rows,
    num_cols,
    MAX_BITS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantize a tile of 128 x 128 in both layouts. Args: x int32 [num_rows, num_cols / 2] with rows `stride` words
    apart; x_fp8 as int16, x_fp8_t as int32; both sizes are multiples of 128."""
    col_tiles = num_cols // _BLOCK
    row_tile = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    first_row = row_tile * _BLOCK
    rows = tl.arange(0, _BLOCK // 4) * 4
    pairs = tl.arange(0, _BLOCK // 2)
    at = x + first_row.to(tl.int64) * stride + col_tile * (_BLOCK // 2) + rows[:, None] * stride + pairs[None, :]
    x0 = tl.load(at)
    x1 = tl.load(at + stride)
    x2 = tl.load(at + 2 * stride)
    x3 = tl.load(at + 3 * stride)

    # Of columns first, which all four are waited for.
    scale_inv_t += row_tile.to(tl.int64) * num_cols + col_tile * _BLOCK
    even, odd = _column_scales(x0, x1, x2, x3, scale_inv_t, pairs, MAX_BITS, PTX)
    width = num_cols // 2
    at = x_fp8 + first_row.to(tl.int64) * width + col_tile * (_BLOCK // 2) + rows[:, None] * width + pairs[None, :]
    scale_inv += col_tile.to(tl.int64) * num_rows + first_row + rows
    _row(x0, at, scale_inv, MAX_BITS, IS_E4M3, PTX)
    _row(x1, at + width, scale_inv + 1, MAX_BITS, IS_E4M3, PTX)
    _row(x2, at + 2 * width, scale_inv + 2, MAX_BITS, IS_E4M3, PTX)
    _row(x3, at + 3 * width, scale_inv + 3, MAX_BITS, IS_E4M3, PTX)

    even_word, odd_word = _columns(x0, x1, x2, x3, even, odd, IS_E4M3, PTX)
    height = num_rows // 4
    cols = tl.arange(0, _BLOCK // 2)[:, None] * 2
    quads = tl.arange(0, _BLOCK // 4)[None, :]
    at = x_fp8_t + (col_tile * _BLOCK).to(tl.int64) * height + row_tile * (_BLOCK // 4) + cols * height + quads
    tl.store(at, tl.trans(even_word))
    tl.store(at + height, tl.trans(odd_word))
