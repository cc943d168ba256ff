"""Device code that the fused producers share: bf16 rounding, amaxes as integers, casts to FP8. PTX: ops/_device.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._device import INFINITY, code_of

GIVEN = tl.constexpr(0)
"""The scale is known; the amax is recorded."""
ROWWISE = tl.constexpr(1)
"""Each row is scaled by its own amax."""
AMAX = tl.constexpr(2)
"""First pass of tensorwise: only the amax is written."""
FROM_AMAX = tl.constexpr(3)
"""Second pass of tensorwise: the scale follows from that amax."""

_E4M3_MAX = tl.constexpr(E4M3.max)


def words_to_codes(*scales: str) -> str:
    """PTX that turns two words of two bf16, $1 and $2, times the float32 of these operands, into four E4M3, $0."""
    products = "\n".join(f"mul.rn.f32 y{k}, y{k}, {scale};" for k, scale in enumerate(scales))
    return f"""{{
.reg .b32 x<4>;
.reg .f32 y<4>;
.reg .b16 low, high;
shl.b32 x0, $1, 16;
and.b32 x1, $1, 0xffff0000;
shl.b32 x2, $2, 16;
and.b32 x3, $2, 0xffff0000;
mov.b32 y0, x0;
mov.b32 y1, x1;
mov.b32 y2, x2;
mov.b32 y3, x3;
{products}
cvt.rn.satfinite.e4m3x2.f32 low, y1, y0;
cvt.rn.satfinite.e4m3x2.f32 high, y3, y2;
mov.b32 $0, {{low, high}};
}}"""


_QUANTIZE_E4M3 = tl.constexpr(words_to_codes("$3", "$4", "$5", "$6"))
_QUANTIZE_E5M2 = tl.constexpr(_QUANTIZE_E4M3.value.replace("e4m3x2", "e5m2x2"))
_FROM_BF16 = tl.constexpr("""
shl.b32 $0, $4, 16;
and.b32 $1, $4, 0xffff0000;
shl.b32 $2, $5, 16;
and.b32 $3, $5, 0xffff0000;
""")
_TO_BF16 = tl.constexpr("""
cvt.rn.bf16x2.f32 $0, $3, $2;
cvt.rn.bf16x2.f32 $1, $5, $4;
""")


@triton.jit
def to_float(x, PTX: tl.constexpr):
    """Convert bf16 or float32 to float32."""
    if x.dtype == tl.float32:
        y = x
    elif PTX:
        y = tl.inline_asm_elementwise(_FROM_BF16, "=r,=r,=r,=r,r,r", [x], tl.float32, is_pure=True, pack=4)
    else:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return y


@triton.jit
def to_bf16(x, PTX: tl.constexpr):
    """Convert float32 to bf16, to nearest even.

    PTX converts two at a time: where a cast is not only stored, Triton's converts one, at an eighth of the rate.
    """
    if PTX:
        y = tl.inline_asm_elementwise(_TO_BF16, "=r,=r,f,f,f,f", [x], tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > INFINITY
        bits = tl.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


_TIMES = tl.constexpr("""
mul.rn.bf16x2 $0, $2, $4;
mul.rn.bf16x2 $1, $3, $5;
""")


@triton.jit
def times(x, y, PTX: tl.constexpr):
    """Multiply two bf16 tensors; the product is bf16.

    Both forms round as if once, subnormals too: a product has 16 bits, so float32 holds it exactly from 2**-134, below
    which all of bf16 is zero.
    """
    if PTX:
        return tl.inline_asm_elementwise(_TIMES, "=r,=r,r,r,r,r", [x, y], tl.bfloat16, is_pure=True, pack=4)
    return to_bf16(to_float(x, PTX) * to_float(y, PTX), PTX)


_LARGER = tl.constexpr("""{
.reg .b32 low, high;
and.b32 low, $4, 0x7fff7fff;
and.b32 high, $5, 0x7fff7fff;
max.NaN.bf16x2 $0, $2, low;
max.NaN.bf16x2 $1, $3, high;
}""")


@triton.jit
def larger(largest, x, PTX: tl.constexpr):
    """Return the larger of `largest` and |x| in bf16, both as int16 bits: infinity is largest but for NaN.

    PTX takes two elements at a time.
    """
    if PTX:
        found = tl.inline_asm_elementwise(_LARGER, "=r,=r,r,r,r,r", [largest, x], tl.int16, is_pure=True, pack=4)
    else:
        found = tl.maximum(largest, x.to(tl.int16, bitcast=True) & 0x7FFF)
    return found


@triton.jit
def bits_of_largest(largest):
    """Return the int32 bits, as float32, of the largest of what `larger` gives for a vector or a matrix."""
    wide = largest.to(tl.int32)
    if len(wide.shape) == 2:
        wide = tl.max(wide, 1)
    return tl.max(wide, 0) << 16


@triton.jit
def quantize(x, factor, FP8_MAX: tl.constexpr, PTX: tl.constexpr):
    """Return codes, uint8, of bf16 times `factor`: to nearest even, saturating, NaN stays. FP8_MAX names the format.

    The input is bf16: what waits in registers for its scale takes two bytes an element, not four.
    """
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    if PTX:
        TEXT: tl.constexpr = _QUANTIZE_E4M3 if IS_E4M3 else _QUANTIZE_E5M2
        factor = tl.zeros(x.shape, tl.float32) + factor
        codes = tl.inline_asm_elementwise(TEXT, "=r,r,r,f,f,f,f", [x, factor], tl.uint8, is_pure=True, pack=4)
    else:
        codes = code_of(to_float(x, PTX) * factor, IS_E4M3).to(tl.uint8)
    return codes
