"""Device code that the fused producers share: bf16 rounding, amaxes as integers, scales, casts to FP8.

`PTX` is true on NVIDIA's GPUs: their own conversions are taken then. The plain forms beside them give the same bits and
are what Triton's interpreter runs, whose conversions to and from bf16 and FP8 truncate or lose subnormals.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.formats import E4M3
from fp8_ds.scaling.current import MAX_SCALE

GIVEN = tl.constexpr(0)
"""Scale known; the amax is recorded."""
ROWWISE = tl.constexpr(1)
"""Each row by its own amax."""
AMAX = tl.constexpr(2)
"""First pass of tensorwise: nothing but the amax leaves."""
FROM_AMAX = tl.constexpr(3)
"""Second pass of tensorwise: the scale follows from that amax."""

INFINITY = tl.constexpr(0x7F800000)
"""Bits of infinity: magnitudes whose bits are not below are not finite."""
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_E4M3_MAX = tl.constexpr(E4M3.max)

_QUANTIZE_E4M3 = tl.constexpr("""{
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
mul.rn.f32 y0, y0, $3;
mul.rn.f32 y1, y1, $4;
mul.rn.f32 y2, y2, $5;
mul.rn.f32 y3, y3, $6;
cvt.rn.satfinite.e4m3x2.f32 low, y1, y0;
cvt.rn.satfinite.e4m3x2.f32 high, y3, y2;
mov.b32 $0, {low, high};
}""")
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
    """float32 of bf16 or float32."""
    if x.dtype == tl.float32:
        y = x
    elif PTX:
        y = tl.inline_asm_elementwise(_FROM_BF16, "=r,=r,=r,=r,r,r", [x], tl.float32, is_pure=True, pack=4)
    else:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return y


@triton.jit
def to_bf16(x, PTX: tl.constexpr):
    """float32 to bf16, to nearest even.

    In PTX two at a time: where a cast is not only stored, Triton's converts one, at an eighth of the rate.
    """
    if PTX:
        y = tl.inline_asm_elementwise(_TO_BF16, "=r,=r,f,f,f,f", [x], tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > INFINITY
        bits = tl.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def magnitude(x):
    """Bits of |x|, int32, of float32: compare as the floats do, infinity above all finite ones, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def record_amax(amax, bits):
    """`amax` (float32 in memory, >= 0) is at least the float with these bits; NaN stays.

    Most programs find a larger one there and save the atomic.
    """
    at = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    if bits > tl.load(at):
        tl.atomic_max(at, bits, sem="relaxed")


@triton.jit
def scale_from_amax(bits, FP8_MAX: tl.constexpr):
    """`scaling.current.scale_from_amax` of the float with these bits: (scale, scale_inv)."""
    has_scale = (bits > 0) & (bits < INFINITY)
    amax = tl.where(has_scale, bits, 0x3F800000).to(tl.float32, bitcast=True)
    quotient = tl.minimum(tl.div_rn(FP8_MAX, amax), _MAX_SCALE)
    scale = tl.where(has_scale, quotient, 1.0)
    scale_inv = tl.div_rn(1.0, scale)
    return scale, tl.where(bits < INFINITY, scale_inv, float("nan"))


@triton.jit
def quantize(x, factor, FP8_MAX: tl.constexpr, PTX: tl.constexpr):
    """Codes, uint8, of bf16 times `factor`: to nearest even, saturating, NaN stays. FP8_MAX names the format.

    From bf16 in one block: what waits in registers for its scale takes two bytes an element, not four.
    """
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    if PTX:
        TEXT: tl.constexpr = _QUANTIZE_E4M3 if IS_E4M3 else _QUANTIZE_E5M2
        factor = tl.zeros(x.shape, tl.float32) + factor
        codes = tl.inline_asm_elementwise(TEXT, "=r,r,r,f,f,f,f", [x, factor], tl.uint8, is_pure=True, pack=4)
    else:
        DROP: tl.constexpr = 20 if IS_E4M3 else 21  # mantissa bits that FP8 lacks
        BIAS: tl.constexpr = 120 if IS_E4M3 else 112  # of float32, less that of FP8
        MAGIC: tl.constexpr = 2.0**14 if IS_E4M3 else 2.0**7  # its last mantissa bit is the smallest subnormal
        bits = (to_float(x, PTX) * factor).to(tl.int32, bitcast=True)
        mag = bits & 0x7FFFFFFF
        capped = tl.minimum(mag.to(tl.float32, bitcast=True), FP8_MAX)
        small = (capped + MAGIC).to(tl.int32, bitcast=True) & 0xFF
        wide = capped.to(tl.int32, bitcast=True)
        wide = ((wide + ((1 << (DROP - 1)) - 1) + ((wide >> DROP) & 1)) >> DROP) - (BIAS << (23 - DROP))
        code = tl.where(capped < 2.0 ** (BIAS - 126), small, wide)
        code = tl.where(mag > INFINITY, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes
