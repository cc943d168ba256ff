"""Device code that kernels share: magnitudes as integers, scales, rounding to bf16, codes of FP8.

`PTX` is true on NVIDIA GPUs, where the hardware's own conversions are used. The plain formulas beside them give the
same codes (except for the sign of NaN) and are for Triton's interpreter: its conversions to and from bf16 and FP8
truncate, lose subnormals or do not carry into the exponent.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import MAX_SCALE

_ENCODE = """{
.reg .b16 low, high;
cvt.rn.satfinite.FORMATx2.f32 low, $2, $1;
cvt.rn.satfinite.FORMATx2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}"""
ENCODE_E4M3 = tl.constexpr(_ENCODE.replace("FORMAT", "e4m3"))
"""Four numbers to four codes in one register, the first in the lowest byte."""
ENCODE_E5M2 = tl.constexpr(_ENCODE.replace("FORMAT", "e5m2"))

INFINITY = tl.constexpr(0x7F800000)
"""Bits of infinity; a magnitude is finite if its bits are below these."""
NAN = tl.constexpr(0x7FC00000)
"""Bits of the plain NaN."""
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_MIN_SCALE_INV = tl.constexpr(1 / MAX_SCALE)


def runs_ptx(x: Tensor) -> bool:
    """Whether kernels on the device of `x` take their PTX blocks, or the plain formulas beside them."""
    return x.is_cuda and torch.version.hip is None


@triton.jit
def magnitude(x):
    """Return the bits of |x|, int32, of float32. They compare as the floats do: infinity is largest but for NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(bits, FP8_MAX: tl.constexpr):
    """Return (scale, scale_inv) for the float with these bits, as `numerics.scale.scale_from_amax` does."""
    has_scale = (bits > 0) & (bits < INFINITY)
    amax = tl.where(has_scale, bits, 0x3F800000).to(tl.float32, bitcast=True)
    quotient = tl.minimum(tl.div_rn(tl.zeros_like(amax) + FP8_MAX, amax), _MAX_SCALE)
    scale = tl.where(has_scale, quotient, 1.0)
    scale_inv = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return scale, tl.where(bits < INFINITY, scale_inv, float("nan"))


@triton.jit
def row_scale_from_amax(bits, FP8_MAX: tl.constexpr):
    """Return (scale, scale_inv) for the float with these bits, as `numerics.scale.row_scale_from_amax` does."""
    scale, scale_inv = scale_from_amax(bits, FP8_MAX)
    return tl.where(bits == 0, _MAX_SCALE, scale), tl.where(bits == 0, _MIN_SCALE_INV, scale_inv)


@triton.jit
def record_amax(amax, bits):
    """Raise `amax` (float32 in memory, >= 0) to at least the float with these bits, a scalar; NaN stays.

    Most programs find a larger one there already, and need no atomic operation.
    """
    at = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(at, bits, bits > tl.load(at), sem="relaxed")


@triton.jit
def code_of(x, IS_E4M3: tl.constexpr):
    """Return the FP8 code of a float32, int32 in 0 to 255: to nearest even, saturating, NaN stays; by integers.

    Below the smallest normal number one addition rounds: the sum's last bit weighs one subnormal step.
    """
    MANTISSA: tl.constexpr = 3 if IS_E4M3 else 2
    BIAS: tl.constexpr = 7 if IS_E4M3 else 15
    LARGEST: tl.constexpr = 0x7E if IS_E4M3 else 0x7B
    DROP: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    normal = ((mag + ((1 << (DROP - 1)) - 1) + ((mag >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    STEP: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    shifted = mag.to(tl.float32, bitcast=True) + STEP
    subnormal = shifted.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.minimum(tl.where(mag < ((128 - BIAS) << 23), subnormal, normal), LARGEST)
    return tl.where(mag > INFINITY, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def encode_four(x0, x1, x2, x3, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Encode four tensors as the bytes of one int32 each; the first tensor gives the lowest byte."""
    if PTX:
        ENCODE: tl.constexpr = ENCODE_E4M3 if IS_E4M3 else ENCODE_E5M2
        return tl.inline_asm_elementwise(ENCODE, "=r,f,f,f,f", [x0, x1, x2, x3], tl.int32, is_pure=True, pack=1)
    low = code_of(x0, IS_E4M3) | (code_of(x1, IS_E4M3) << 8)
    return low | (code_of(x2, IS_E4M3) << 16) | (code_of(x3, IS_E4M3) << 24)


@triton.jit
def decode(code, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Decode uint8 codes to float32; the interpreter, which takes a NaN's code for a number, does so by integers."""
    if PTX:
        value = code.to(tl.float8e4nv if IS_E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
    else:
        DROP: tl.constexpr = 20 if IS_E4M3 else 21
        TOP: tl.constexpr = 0x7E if IS_E4M3 else 0x7B
        UP: tl.constexpr = 2.0**120 if IS_E4M3 else 2.0**112
        mag = code.to(tl.int32) & 0x7F
        number = ((mag << DROP).to(tl.float32, bitcast=True) * UP).to(tl.int32, bitcast=True)
        beyond = NAN if IS_E4M3 else INFINITY | ((mag & 3) << DROP)
        bits = tl.where(mag > TOP, beyond, number)
        value = (bits | ((code.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def encode_bytes(x, IS_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Return the codes of a tensor, uint8."""
    if PTX:
        ENCODE: tl.constexpr = ENCODE_E4M3 if IS_E4M3 else ENCODE_E5M2
        code = tl.inline_asm_elementwise(ENCODE, "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4)
    else:
        code = code_of(x, IS_E4M3).to(tl.uint8)
    return code


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
