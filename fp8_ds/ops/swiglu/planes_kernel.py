"""The device code of SwiGLU's transposed planes: the arithmetic of `kernel`, the tiles of `quantize/kernel.py`.

A program has 16 * VECTORS rows and 4 * WORDS columns. Four neighbouring elements make one word of FP8 bytes, and tiles
are transposed in registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.formats import E4M3
from fp8_ds.ops._device import INFINITY, encode_four, magnitude, record_amax, scale_from_amax
from fp8_ds.ops._producer_device import FROM_AMAX, to_bf16, to_float
from fp8_ds.ops.quantize.words import larger_magnitude, load_words
from fp8_ds.ops.swiglu.kernel import sigmoid
from fp8_ds.ops.transpose.triton import store_columns, store_word, transpose_words

_E4M3_MAX = tl.constexpr(E4M3.max)

_ROUND_FOUR = tl.constexpr("""{
.reg .b32 low, high;
cvt.rn.bf16x2.f32 low, $5, $4;
cvt.rn.bf16x2.f32 high, $7, $6;
shl.b32 $0, low, 16;
and.b32 $1, low, 0xffff0000;
shl.b32 $2, high, 16;
and.b32 $3, high, 0xffff0000;
}""")


@triton.jit
def _round_four(x0, x1, x2, x3, PTX: tl.constexpr):
    """float32 to what bf16 would hold."""
    if PTX:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _ROUND_FOUR,
            "=r,=r,=r,=r,f,f,f,f",
            [x0, x1, x2, x3],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        x0, x1 = to_float(to_bf16(x0, PTX), PTX), to_float(to_bf16(x1, PTX), PTX)
        x2, x3 = to_float(to_bf16(x2, PTX), PTX), to_float(to_bf16(x3, PTX), PTX)
    return x0, x1, x2, x3


@triton.jit
def _scale(scale, scale_inv, amax, MODE: tl.constexpr, FP8_MAX: tl.constexpr):
    """Given, or from the amax of all, whose inverse the first program stores."""
    if MODE == FROM_AMAX:
        factor, inverse = scale_from_amax(magnitude(tl.load(amax)), FP8_MAX)
        tl.store(scale_inv, inverse, tl.program_id(0) == 0)
    else:
        factor = tl.load(scale)
    return factor


@triton.jit
def _product_row(
    gate, up, row, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
    WORDS: tl.constexpr, TWICE: tl.constexpr, IS_E4M3: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One row of each 16 in a tile: (its codes, the largest magnitudes so far)."""
    word = tl.arange(0, WORDS)[None, :]
    left = tl.where(row < num_rows, num_cols - first_col, 0)
    wide = row.to(tl.int64)
    g0, g1, g2, g3 = load_words(gate + first_col + wide * gate_stride, word, left, VECTOR, PTX)
    u0, u1, u2, u3 = load_words(up + first_col + wide * up_stride, word, left, VECTOR, PTX)
    s0, s1, s2, s3 = g0 * sigmoid(g0, PTX), g1 * sigmoid(g1, PTX), g2 * sigmoid(g2, PTX), g3 * sigmoid(g3, PTX)
    if TWICE:
        s0, s1, s2, s3 = _round_four(s0, s1, s2, s3, PTX)
    h0, h1, h2, h3 = _round_four(s0 * u0, s1 * u1, s2 * u2, s3 * u3, PTX)
    largest = larger_magnitude(largest, h0, h1, h2, h3, PTX)
    return encode_four(h0 * factor, h1 * factor, h2 * factor, h3 * factor, IS_E4M3, PTX), largest


@triton.jit
def _product_rows(
    gate, up, row, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
    WORDS: tl.constexpr, TWICE: tl.constexpr, IS_E4M3: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`_product_row` of `row` to `row + 3`, their words transposed by 4 x 4."""
    a, largest = _product_row(
        gate, up, row, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    b, largest = _product_row(
        gate, up, row + 1, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    c, largest = _product_row(
        gate, up, row + 2, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    d, largest = _product_row(
        gate, up, row + 3, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    a, b, c, d = transpose_words(a, b, c, d, PTX)
    return a, b, c, d, largest


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax"])
def swiglu_columns_kernel(
    gate, up, columns, scale, scale_inv, amax, num_rows, num_cols, gate_stride, up_stride,
    VECTORS: tl.constexpr, WORDS: tl.constexpr, MODE: tl.constexpr, TWICE: tl.constexpr, FP8_MAX: tl.constexpr,
    VECTOR_IN: tl.constexpr, VECTOR_OUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The transposed plane of `silu(gate) * up`, and no other. MODE GIVEN: a product that is not finite spoils
    scale_inv; nothing is recorded."""
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_row = tl.program_id(0) // tiles_per_row * (VECTORS * 16)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    factor = _scale(scale, scale_inv, amax, MODE, FP8_MAX)
    row = first_row + tl.arange(0, VECTORS)[:, None] * 16
    largest = tl.zeros([VECTORS, WORDS], tl.int32)
    a0, a1, a2, a3, largest = _product_rows(
        gate, up, row, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    b0, b1, b2, b3, largest = _product_rows(
        gate, up, row + 4, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    c0, c1, c2, c3, largest = _product_rows(
        gate, up, row + 8, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    d0, d1, d2, d3, largest = _product_rows(
        gate, up, row + 12, first_col, num_rows, num_cols, gate_stride, up_stride, factor, largest,
        WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    store_columns(
        columns, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
        num_rows, num_cols, VECTOR_OUT, PTX,
    )  # fmt: skip
    if MODE != FROM_AMAX:
        tl.store(scale_inv, float("nan"), tl.max(tl.max(largest, 1), 0) >= INFINITY)


@triton.jit
def _gradients_word(grad, gate, up, PTX: tl.constexpr):
    """float32 of one element of each word: (silu, grad * up, sigmoid)."""
    s = sigmoid(gate, PTX)
    return gate * s, grad * up, s


@triton.jit
def _gradient_row(
    grad_hidden, gate, up, gate_rows, up_rows, row, first_col, num_rows, num_cols, grad_stride, gate_stride, up_stride,
    gate_factor, up_factor, gate_largest, up_largest,
    WORDS: tl.constexpr, TWICE: tl.constexpr, IS_E4M3: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One row of each 16 in a tile, both gradients stored: (codes of gate's, of up's, largest magnitudes so far)."""
    word = tl.arange(0, WORDS)[None, :]
    left = tl.where(row < num_rows, num_cols - first_col, 0)
    wide = row.to(tl.int64)
    y0, y1, y2, y3 = load_words(grad_hidden + first_col + wide * grad_stride, word, left, VECTOR, PTX)
    g0, g1, g2, g3 = load_words(gate + first_col + wide * gate_stride, word, left, VECTOR, PTX)
    u0, u1, u2, u3 = load_words(up + first_col + wide * up_stride, word, left, VECTOR, PTX)
    silu0, p0, s0 = _gradients_word(y0, g0, u0, PTX)
    silu1, p1, s1 = _gradients_word(y1, g1, u1, PTX)
    silu2, p2, s2 = _gradients_word(y2, g2, u2, PTX)
    silu3, p3, s3 = _gradients_word(y3, g3, u3, PTX)
    if TWICE:
        silu0, silu1, silu2, silu3 = _round_four(silu0, silu1, silu2, silu3, PTX)
        p0, p1, p2, p3 = _round_four(p0, p1, p2, p3, PTX)
    p0, p1, p2, p3 = _round_four(
        (p0 * s0) * (1.0 + g0 * (1.0 - s0)),
        (p1 * s1) * (1.0 + g1 * (1.0 - s1)),
        (p2 * s2) * (1.0 + g2 * (1.0 - s2)),
        (p3 * s3) * (1.0 + g3 * (1.0 - s3)),
        PTX,
    )
    y0, y1, y2, y3 = _round_four(y0 * silu0, y1 * silu1, y2 * silu2, y3 * silu3, PTX)
    gate_largest = larger_magnitude(gate_largest, p0, p1, p2, p3, PTX)
    up_largest = larger_magnitude(up_largest, y0, y1, y2, y3, PTX)
    gate_code = encode_four(p0 * gate_factor, p1 * gate_factor, p2 * gate_factor, p3 * gate_factor, IS_E4M3, PTX)
    up_code = encode_four(y0 * up_factor, y1 * up_factor, y2 * up_factor, y3 * up_factor, IS_E4M3, PTX)
    at = wide * num_cols + first_col
    store_word(gate_rows + at, word, gate_code, left, VECTOR)
    store_word(up_rows + at, word, up_code, left, VECTOR)
    return gate_code, up_code, gate_largest, up_largest


@triton.jit
def _gradient_rows(
    grad_hidden, gate, up, gate_rows, up_rows, row, first_col, num_rows, num_cols, grad_stride, gate_stride, up_stride,
    gate_factor, up_factor, gate_largest, up_largest,
    WORDS: tl.constexpr, TWICE: tl.constexpr, IS_E4M3: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`_gradient_row` of `row` to `row + 3`, their words transposed by 4 x 4: gate's, then up's."""
    a, e, gate_largest, up_largest = _gradient_row(
        grad_hidden, gate, up, gate_rows, up_rows, row, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    b, f, gate_largest, up_largest = _gradient_row(
        grad_hidden, gate, up, gate_rows, up_rows, row + 1, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    c, g, gate_largest, up_largest = _gradient_row(
        grad_hidden, gate, up, gate_rows, up_rows, row + 2, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    d, h, gate_largest, up_largest = _gradient_row(
        grad_hidden, gate, up, gate_rows, up_rows, row + 3, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR, PTX,
    )  # fmt: skip
    a, b, c, d = transpose_words(a, b, c, d, PTX)
    e, f, g, h = transpose_words(e, f, g, h, PTX)
    return a, b, c, d, e, f, g, h, gate_largest, up_largest


@triton.jit
def _take(scale_inv, amax, largest):
    """The amax of one program is recorded; a non-finite one spoils scale_inv."""
    bits = tl.max(tl.max(largest, 1), 0)
    record_amax(amax, bits)
    tl.store(scale_inv, float("nan"), bits >= INFINITY)


@triton.jit(
    do_not_specialize_on_alignment=["gate_scale", "gate_scale_inv", "gate_amax", "up_scale", "up_scale_inv", "up_amax"]
)
def swiglu_backward_planes_kernel(
    grad_hidden, gate, up, gate_rows, gate_columns, up_rows, up_columns,
    gate_scale, gate_scale_inv, gate_amax, up_scale, up_scale_inv, up_amax,
    num_rows, num_cols, grad_stride, gate_stride, up_stride,
    VECTORS: tl.constexpr, WORDS: tl.constexpr, MODE: tl.constexpr, TWICE: tl.constexpr, FP8_MAX: tl.constexpr,
    VECTOR_IN: tl.constexpr, VECTOR_OUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Both gradients in both planes. MODE GIVEN: their amaxes are recorded; FROM_AMAX: the scales follow from them."""
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_row = tl.program_id(0) // tiles_per_row * (VECTORS * 16)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    gate_factor = _scale(gate_scale, gate_scale_inv, gate_amax, MODE, FP8_MAX)
    up_factor = _scale(up_scale, up_scale_inv, up_amax, MODE, FP8_MAX)
    row = first_row + tl.arange(0, VECTORS)[:, None] * 16
    gate_largest = tl.zeros([VECTORS, WORDS], tl.int32)
    up_largest = gate_largest
    a0, a1, a2, a3, e0, e1, e2, e3, gate_largest, up_largest = _gradient_rows(
        grad_hidden, gate, up, gate_rows, up_rows, row, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    b0, b1, b2, b3, f0, f1, f2, f3, gate_largest, up_largest = _gradient_rows(
        grad_hidden, gate, up, gate_rows, up_rows, row + 4, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    c0, c1, c2, c3, g0, g1, g2, g3, gate_largest, up_largest = _gradient_rows(
        grad_hidden, gate, up, gate_rows, up_rows, row + 8, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    d0, d1, d2, d3, h0, h1, h2, h3, gate_largest, up_largest = _gradient_rows(
        grad_hidden, gate, up, gate_rows, up_rows, row + 12, first_col, num_rows, num_cols, grad_stride, gate_stride,
        up_stride, gate_factor, up_factor, gate_largest, up_largest, WORDS, TWICE, IS_E4M3, VECTOR_IN, PTX,
    )  # fmt: skip
    store_columns(
        gate_columns, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
        num_rows, num_cols, VECTOR_OUT, PTX,
    )  # fmt: skip
    store_columns(
        up_columns, first_row, first_col, e0, e1, e2, e3, f0, f1, f2, f3, g0, g1, g2, g3, h0, h1, h2, h3,
        num_rows, num_cols, VECTOR_OUT, PTX,
    )  # fmt: skip
    if MODE != FROM_AMAX:
        _take(gate_scale_inv, gate_amax, gate_largest)
        _take(up_scale_inv, up_amax, up_largest)
