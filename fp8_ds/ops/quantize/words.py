"""Words of four neighbouring elements, read as float32, and their magnitudes: device code for the kernels beside.

Every thread loads 16 bytes at a time where the tensor is aligned. `ops/transpose/triton.py` stores words.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import magnitude

LOAD_16_BYTES = """{
.reg .pred inside;
setp.ne.b32 inside, $5, 0;
mov.f32 $0, 0f00000000;
mov.f32 $1, 0f00000000;
mov.f32 $2, 0f00000000;
mov.f32 $3, 0f00000000;
@inside ld.global.v4.f32 {$0, $1, $2, $3}, [$4];
}"""
"""Load four floats of one thread into four tensors: `tl.load` gives one, and splits it through shared memory."""

_LOAD_16_BYTES = tl.constexpr(LOAD_16_BYTES)


@triton.jit
def load_words(x, word, num, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Load elements `4 * word` to `4 * word + 3` behind `x`, 0 from element `num` on: four float32 tensors.

    VECTOR: `x` lies at a multiple of 16 bytes and `num` is a multiple of 16.
    """
    ITEM_BITS: tl.constexpr = x.dtype.scalar.element_ty.primitive_bitwidth
    ELEMENT: tl.constexpr = x.dtype.scalar.element_ty
    if not VECTOR:
        x0 = tl.load(x + word * 4, word * 4 < num, 0.0).to(tl.float32)
        x1 = tl.load(x + word * 4 + 1, word * 4 + 1 < num, 0.0).to(tl.float32)
        x2 = tl.load(x + word * 4 + 2, word * 4 + 2 < num, 0.0).to(tl.float32)
        x3 = tl.load(x + word * 4 + 3, word * 4 + 3 < num, 0.0).to(tl.float32)
    elif ITEM_BITS == 32:
        x0, x1, x2, x3 = _load_floats(x + word * 4, word // 4 * 16 < num, PTX)
    else:
        four = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + word, word // 4 * 16 < num, 0)
        x0, x1 = _pair(four.to(tl.int32), ELEMENT)
        x2, x3 = _pair((four >> 32).to(tl.int32), ELEMENT)
    return x0, x1, x2, x3


@triton.jit
def _load_floats(at, inside, PTX: tl.constexpr):
    """Load four float32 numbers behind each pointer."""
    if PTX:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _LOAD_16_BYTES,
            "=&f,=&f,=&f,=&f,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        x0, x1 = tl.load(at, inside, 0.0), tl.load(at + 1, inside, 0.0)
        x2, x3 = tl.load(at + 2, inside, 0.0), tl.load(at + 3, inside, 0.0)
    return x0, x1, x2, x3


@triton.jit
def _pair(bits, ELEMENT: tl.constexpr):
    """Split bits into two numbers of 16 bits, the first one in the low half, as float32."""
    if ELEMENT.is_bf16():
        first, second = (bits << 16).to(tl.float32, bitcast=True), (bits & ~0xFFFF).to(tl.float32, bitcast=True)
    else:
        first = bits.to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
        second = (bits >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def largest_magnitude(x0, x1, x2, x3):
    """Return the bits of the largest magnitude in each word."""
    return tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))


@triton.jit
def load_folded(x, fold, first, word, num, num_in_row, HAS_FOLD: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Load as `load_words` the rows behind `x`, from column `first` on, each element times that of `fold`."""
    x0, x1, x2, x3 = load_words(x, word, num, VECTOR, PTX)
    if HAS_FOLD:
        f0, f1, f2, f3 = load_words(fold + first, word, num_in_row - first, VECTOR, PTX)
        x0, x1, x2, x3 = x0 * f0, x1 * f1, x2 * f2, x3 * f3
    return x0, x1, x2, x3
