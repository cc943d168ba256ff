"""Arithmetic of kernel.py, for an element or a group at a time: random words, codes, scales, roots.

PTX (ops/_device.py) selects the blocks of ptx.py instead of the plain formulas beside them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics import rounding
from fp8_ds.ops.adamw import ptx

UP = tl.constexpr(2.0**120)
DOWN = tl.constexpr(2.0**-120)
_BF16_PAIRS = tl.constexpr(ptx.BF16_PAIRS)
_RECIPROCAL = tl.constexpr(ptx.RECIPROCAL)
_ROOT_AND_RECIPROCAL = tl.constexpr(ptx.ROOT_AND_RECIPROCAL)
_DECODE_E4M4 = tl.constexpr(ptx.DECODE_E4M4)
_ENCODE_MOMENTS = tl.constexpr(ptx.ENCODE_MOMENTS)
_DECODE_E4M11 = tl.constexpr(ptx.DECODE_E4M11)

_MIX_1 = tl.constexpr(rounding.MIX_1)
_MIX_2 = tl.constexpr(rounding.MIX_2)
_NEXT_PAIR = tl.constexpr(rounding.NEXT_PAIR)
_PAIR_AFTER = tl.constexpr(rounding.NEXT_PAIR * rounding.NEXT_PAIR & 0xFFFFFFFF)


@triton.jit
def mix(x):
    """Hash as `rounding.mix` does, in uint32."""
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    return x ^ (x >> 15)


@triton.jit
def words_of(x, twist, moved):
    """Return uint32 [rows, 4 n], as `rounding._words`, of uint32 [rows, n]: `number * WEYL + first` of eight elements.

    `twist` is `second ^ (second >> 15)`: the second key is mixed in after the shift, not before.
    """
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15) ^ twist) * _MIX_2
    x = x ^ (x >> 15)
    x = tl.interleave(x, x * _PAIR_AFTER)
    return tl.interleave(x, x * _NEXT_PAIR) + moved


@triton.jit
def group_scale_inv(amax, MAX: tl.constexpr, TINY: tl.constexpr, PTX: tl.constexpr):
    """Return `moments.group_scale_inv` and its inverse, 0 for a group of zeros."""
    is_zero = amax < TINY
    if PTX:
        # A quotient by a constant, corrected by its exact remainder: correctly rounded for every mantissa (tested).
        quotient = amax * (1.0 / MAX)
        quotient = tl.fma(tl.fma(quotient, -MAX, amax), 1.0 / MAX, quotient)
    else:
        quotient = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    scale_inv = ((quotient.to(tl.int32, bitcast=True) + 0x10) & ~0x1F).to(tl.float32, bitcast=True)
    divisor = tl.where(is_zero, 1.0, scale_inv)
    if PTX:
        scale = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [divisor], tl.float32, is_pure=True, pack=1)
    else:
        scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), divisor)
    return tl.where(is_zero, 0.0, scale_inv), tl.where(is_zero, 0.0, scale)


@triton.jit
def as_float32(grad, PACKED: tl.constexpr):
    if PACKED and grad.dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(_BF16_PAIRS, "=&f,=&f,=&f,=&f,r,r", [grad], tl.float32, is_pure=True, pack=4)
    else:
        out = grad.to(tl.float32)
    return out


@triton.jit
def largest_magnitude(x):
    """Reduce [rows, n] to float32 [rows]: pairs by floats, whose signs are free, then by integers, three at once."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    pairs = tl.maximum(tl.abs(low), tl.abs(high))
    return tl.max(pairs.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def old_v(code, factor, PTX: tl.constexpr):
    """Return the squares of E4M4 codes, which are exact, times a factor per group."""
    if PTX:  # 2**8 smaller
        root = tl.inline_asm_elementwise(_DECODE_E4M4, "=f,=f,=f,=f,r", [code], tl.float32, is_pure=True, pack=4)
        factor = factor * 65536.0
    else:
        root = (code.to(tl.int32) << 19).to(tl.float32, bitcast=True) * UP
    return (root * root) * factor[:, None]


@triton.jit
def encode_moments(m, root, random, PACKED: tl.constexpr):
    """Encode m and root, scaled. `random`: 32 bits for each pair. PACKED: neighbours are in one thread.

    m is finite, because steps with an infinite or NaN gradient are skipped; the codes of a NaN are undefined.
    """
    m = m * DOWN
    root = root * DOWN
    if PACKED:
        m_code, root_code = tl.inline_asm_elementwise(
            _ENCODE_MOMENTS,
            "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            [m, root, tl.interleave(random, random)],
            (tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        noise = (tl.interleave(random, random >> 16) & 0xFFF0).to(tl.int32) | 8
        root_code = ((root.to(tl.int32, bitcast=True) + noise * 8) >> 19).to(tl.uint8)
        rounded = m.to(tl.int32, bitcast=True) + (noise * 15 + 0x8000)
        m_code = (((rounded >> 20) & 0x7F) | ((rounded >> 24) & 0x80)).to(tl.uint8)
    return m_code, root_code


@triton.jit
def root_and_reciprocal(v, factor, eps, PTX: tl.constexpr):
    """Return `root = sqrt(v)` and `1 / (root * factor + eps)`."""
    if PTX:
        factor = tl.zeros(v.shape, tl.float32) + factor
        eps = tl.zeros(v.shape, tl.float32) + eps
        root, reciprocal = tl.inline_asm_elementwise(
            _ROOT_AND_RECIPROCAL,
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f",
            [v, factor, eps],
            (tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        root = tl.sqrt_rn(v)
        reciprocal = tl.div_rn(tl.full(v.shape, 1.0, tl.float32), root * factor + eps)
    return root, reciprocal


@triton.jit
def decode_fp8_master(hi, lo, LO_BITS: tl.constexpr, DROP_BITS: tl.constexpr, PTX: tl.constexpr):
    """Return the bits of the master over scale_inv and over 2**120, at their place in float32."""
    if PTX and LO_BITS == 8:
        raw = tl.inline_asm_elementwise(_DECODE_E4M11, "=f,=f,=f,=f,r,r", [hi, lo], tl.float32, is_pure=True, pack=4)
    else:
        code = hi.to(tl.int32)
        bits = (((code & 0x7F) << LO_BITS) + lo.to(tl.int32)) << DROP_BITS
        raw = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return raw


@triton.jit
def decode_bf16_master(hi, lo, LO_BITS: tl.constexpr, DROP_BITS: tl.constexpr):
    """Return the master in float32; `hi`: the bits of bf16, int16."""
    code = hi.to(tl.int32)
    mag = tl.maximum(((code & 0x7FFF) << LO_BITS) + lo.to(tl.int32), 0)  # < 0: a parameter zeroed by a user
    return ((mag << DROP_BITS) | ((code >> 31) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def encode_master(
    w, random, LO_BITS: tl.constexpr, DROP_BITS: tl.constexpr, MAX_MAG: tl.constexpr, HI_BITS: tl.constexpr
):
    """Encode float32 numbers as integers (high, low, magnitude). `random`: 32 bits a pair; None: to nearest even."""
    bits = w.to(tl.int32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    if random is not None:
        mask: tl.constexpr = (1 << DROP_BITS) - 1
        mag += tl.interleave((random >> (16 - DROP_BITS)) & mask, random >> (32 - DROP_BITS)).to(tl.int32)
    else:
        mag += (1 << (DROP_BITS - 1)) - 1 + ((mag >> DROP_BITS) & 1)
    mag = tl.minimum(mag >> DROP_BITS, MAX_MAG)
    hi = (mag + (1 << (LO_BITS - 1))) >> LO_BITS
    sign = (bits >> (32 - HI_BITS)) & (1 << (HI_BITS - 1))
    # The low bits of the magnitude, read as signed, are what it exceeds the high part by.
    return hi | sign, mag, mag
