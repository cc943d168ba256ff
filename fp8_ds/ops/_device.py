"""Device code that kernels share: magnitudes as integers, scales, codes of FP8.

`PTX` is true on NVIDIA GPUs, where the hardware's own conversions are used. The plain formulas beside them give the
same codes (except for the sign of NaN) and are for Triton's interpreter: its conversions to and from bf16 and FP8
truncate, lose subnormals or do not carry into the exponent.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

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
