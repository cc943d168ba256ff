"""Arithmetic of kernel.py, for an element or a group at a time: random words, codes, scales, roots.

PTX (ops/_device.py) selects blocks of PTX, four elements at a time, bytes unpacked and packed in registers. Triton's
own code for the plain formulas beside them takes half as many instructions again, and the step is bound by them. Both
have the same bits; the interpreter and other GPUs than NVIDIA's run the formulas.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics import rounding


def _each(template: str) -> str:
    """Repeat `template` four times, with # as the number of the element."""
    return "\n".join(template.replace("#", str(index)) for index in range(4))


def _operands(text: str, **first: int) -> str:
    """Replace the operands' names in `text`, %name0 to %name3, by four numbers of operands from `first[name]` on."""
    for name, start in first.items():
        for index in reversed(range(4)):
            text = text.replace(f"%{name}{index}", f"${start + index}")
    return text


RECIPROCAL = """{
.reg .f32 y, b, e;
rcp.approx.ftz.f32 y, $1;
neg.f32 b, $1;
fma.rn.f32 e, b, y, 0f3F800000;
fma.rn.f32 $0, y, e, y;
}"""
"""Reciprocal as in ROOT_AND_RECIPROCAL: scales of groups are in [2**-109, 2**120]."""

BF16_PAIRS = """{
.reg .b32 t<4>;
shl.b32 t0, $4, 16;
and.b32 t1, $4, 0xffff0000;
shl.b32 t2, $5, 16;
and.b32 t3, $5, 0xffff0000;
mov.b32 $0, t0;
mov.b32 $1, t1;
mov.b32 $2, t2;
mov.b32 $3, t3;
}"""
"""Four bf16 numbers in float32. Triton moves the upper one of two down before it moves it up."""

DECODE_E4M4 = """{
.reg .b32 a, b;
.reg .f16 h<4>;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 a, a, 6;
shl.b32 b, b, 6;
mov.b32 {h0, h1}, a;
mov.b32 {h2, h3}, b;
cvt.f32.f16 $0, h0;
cvt.f32.f16 $1, h1;
cvt.f32.f16 $2, h2;
cvt.f32.f16 $3, h3;
}"""
"""Codes of E4M4 are the upper bits of float16 numbers, 2**8 smaller: bias 15 instead of 7."""

ENCODE_MOMENTS = _operands(
    """{
.reg .b32 n<4>, t<4>, a, b;
lop3.b32 a, $10, 0xfff0fff0, 0x00080008, 0xea;
lop3.b32 b, $12, 0xfff0fff0, 0x00080008, 0xea;
and.b32 n0, a, 0xffff;
shr.u32 n1, a, 16;
and.b32 n2, b, 0xffff;
shr.u32 n3, b, 16;
"""
    + _each("mad.lo.u32 t#, n#, 8, %root#;")
    + """
prmt.b32 a, t0, t1, 0x7632;
prmt.b32 b, t2, t3, 0x7632;
shr.u32 a, a, 3;
shr.u32 b, b, 3;
prmt.b32 $1, a, b, 0x6420;
"""
    + _each("mad.lo.u32 t#, n#, 15, %m#;\nadd.u32 t#, t#, 0x8000;")
    + """
prmt.b32 a, t0, t1, 0x7632;
prmt.b32 b, t2, t3, 0x7632;
shr.u32 n0, a, 4;
shr.u32 n1, a, 8;
shr.u32 n2, b, 4;
shr.u32 n3, b, 8;
lop3.b32 a, n0, n1, 0x00800080, 0xd8;
lop3.b32 b, n2, n3, 0x00800080, 0xd8;
prmt.b32 $0, a, b, 0x6420;
}""",
    m=2,
    root=6,
)
"""Codes of m and of the root, both over 2**120, by the same random bits: elements 0 and 1 take the upper 12 bits of the
low and of the high half of one word, 2 and 3 of another. Outputs are written while inputs are still read."""

DECODE_E4M11 = """{
.reg .b32 a, b, c, t<4>;
xor.b32 c, $5, 0x80808080;
prmt.b32 a, c, $4, 0x5140;
prmt.b32 b, c, $4, 0x7362;
sub.u32 a, a, 0x00800080;
sub.u32 b, b, 0x00800080;
shl.b32 t0, a, 16;
shl.b32 t2, b, 16;
shr.s32 t0, t0, 4;
shr.s32 t1, a, 4;
shr.s32 t2, t2, 4;
shr.s32 t3, b, 4;
and.b32 t0, t0, 0x87fff000;
and.b32 t1, t1, 0x87fff000;
and.b32 t2, t2, 0x87fff000;
and.b32 t3, t3, 0x87fff000;
mov.b32 $0, t0;
mov.b32 $1, t1;
mov.b32 $2, t2;
mov.b32 $3, t3;
}"""
"""Sign and magnitude of two masters in one register: the low byte is signed, no borrow leaves the magnitude. The
shifts copy the sign into the upper exponent bits, which are masked: the value is 2**120 smaller then."""

ENCODE_E4M11 = _operands(
    """{
.reg .b32 s<4>, n<4>, a, b, c, d;
.reg .f32 f<4>;
"""
    + _each("mov.b32 f#, %w#;\nabs.f32 f#, f#;\nmin.f32 f#, f#, 0f07E7F000;\nmov.b32 s#, f#;")
    + """
and.b32 n0, $10, 0xffff;
and.b32 n2, $12, 0xffff;
shr.u32 n1, $10, 16;
shr.u32 n3, $12, 16;
"""
    + _each("mad.lo.u32 s#, s#, 16, n#;\nmov.b32 %u#, s#;\nlop3.b32 s#, s#, %w#, 0x7fffffff, 0xe4;")
    + """
prmt.b32 a, s0, s1, 0x7632;
prmt.b32 b, s2, s3, 0x7632;
add.u32 c, a, 0x00800080;
add.u32 d, b, 0x00800080;
prmt.b32 $0, c, d, 0x7531;
prmt.b32 $1, a, b, 0x6420;
}""",
    u=2,
    w=6,
)
"""Saturates, adds the random bits below the master's last, and packs. Magnitudes come out in bits 16 to 30.

0x07E7F000 is the largest master, `MasterFormat.max_mag`, where float32 has it: capped before the random bits are added,
it stays the largest after. Random bits are taken as in ENCODE_MOMENTS; the four below them meet zeros and carry into
nothing."""

ROOT_AND_RECIPROCAL = _operands(
    """{
.reg .f32 y<4>, h<4>, r<4>, b<4>, e<4>;
"""
    + "\n".join(
        _each(line)
        for line in (
            "rsqrt.approx.ftz.f32 y#, %v#;",
            "mul.rn.ftz.f32 r#, %v#, y#;",
            "mul.rn.ftz.f32 h#, y#, 0f3F000000;",
            "neg.f32 e#, r#;",
            "fma.rn.f32 e#, e#, r#, %v#;",
            "fma.rn.f32 %root#, e#, h#, r#;",
            "mul.rn.f32 b#, %root#, %factor#;",
            "add.rn.f32 b#, b#, %eps#;",
            "rcp.approx.ftz.f32 y#, b#;",
            "neg.f32 b#, b#;",
            "fma.rn.f32 e#, b#, y#, 0f3F800000;",
            "fma.rn.f32 %reciprocal#, y#, e#, y#;",
        )
    )
    + "\n}",
    root=0,
    reciprocal=4,
    v=8,
    factor=12,
    eps=16,
)
"""Root and reciprocal, correctly rounded: ptxas' own sequences for numbers that need no care, without its branches.
Squares from 2**-101 on and divisors in [2**-126, 2**126] are such (tested over all mantissas on the GPU)."""

STORE_SCALES = """{
st.global.f32 [$1], $2;
st.global.f32 [$3], $4;
mov.b32 $0, 0;
}"""

UP = tl.constexpr(2.0**120)
DOWN = tl.constexpr(2.0**-120)
_BF16_PAIRS = tl.constexpr(BF16_PAIRS)
_RECIPROCAL = tl.constexpr(RECIPROCAL)
_ROOT_AND_RECIPROCAL = tl.constexpr(ROOT_AND_RECIPROCAL)
_DECODE_E4M4 = tl.constexpr(DECODE_E4M4)
_ENCODE_MOMENTS = tl.constexpr(ENCODE_MOMENTS)
_DECODE_E4M11 = tl.constexpr(DECODE_E4M11)

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
