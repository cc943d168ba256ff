"""Device code of `swiglu.triton`; the formulas of `reference`, nothing fused; exp and quotients are approximate."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import (
    AMAX,
    FROM_AMAX,
    GIVEN,
    INFINITY,
    ROWWISE,
    magnitude,
    quantize,
    record_amax,
    row_scale_from_amax,
    scale_from_amax,
    times,
    to_bf16,
    to_float,
)

BF16 = tl.constexpr(4)
"""Mode of the backward kernel without FP8, beside those of the producers."""

_SIGMOID = tl.constexpr("""{
.reg .f32 a;
mul.rn.ftz.f32 a, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 a, a;
add.rn.ftz.f32 a, a, 0f3F800000;
rcp.approx.ftz.f32 $0, a;
}""")
# The number is -log2(e). Without .ftz each of the two approximations takes twice the instructions.


@triton.jit
def _place(num_cols, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """Return (row, first column) of this program; rowwise, one program has a whole row."""
    program = tl.program_id(0).to(tl.int64)
    if MODE == FROM_AMAX:
        # Backwards: what the first pass read last is still in the L2 cache.
        program = tl.num_programs(0) - 1 - program
    if MODE == ROWWISE:
        row, first = program, 0
    else:
        blocks = tl.cdiv(num_cols, BLOCK)
        row, first = program // blocks, (program % blocks).to(tl.int32) * BLOCK
    return row, first


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """Compute `1 / (1 + exp(-x))`, within 2**-17 of it for |x| < 87; zero where it is below 2**-126."""
    if PTX:
        y = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def hidden(gate, up, PTX: tl.constexpr):
    """Compute `reference.hidden`."""
    wide = to_float(gate, PTX)
    return times(to_bf16(wide * sigmoid(wide, PTX), PTX), up, PTX)


@triton.jit
def _hidden(gate, up, cols, num_cols, PTX: tl.constexpr):
    """Compute `hidden` for columns of one row."""
    mask = cols < num_cols
    return hidden(tl.load(gate + cols, mask, 0.0), tl.load(up + cols, mask, 0.0), PTX)


@triton.jit
def gradients(grad_hidden, gate, up, PTX: tl.constexpr):
    """Compute `reference.gradients` of bf16 values."""
    grad = to_float(grad_hidden, PTX)
    wide = to_float(gate, PTX)
    s = sigmoid(wide, PTX)
    silu = wide * s
    grad_silu = grad * to_float(up, PTX)
    silu = to_float(to_bf16(silu, PTX), PTX)
    grad_silu = to_float(to_bf16(grad_silu, PTX), PTX)
    grad_gate = (grad_silu * s) * (1.0 + wide * (1.0 - s))
    return to_bf16(grad_gate, PTX), to_bf16(grad * silu, PTX)


@triton.jit
def _largest(x, PTX: tl.constexpr):
    return tl.max(magnitude(to_float(x, PTX)))


@triton.jit
def _store(x_fp8, hp, cols, num_cols, y, factor, HAS_HP: tl.constexpr, FP8_MAX: tl.constexpr, PTX: tl.constexpr):
    mask = cols < num_cols
    tl.store(x_fp8 + cols, quantize(y, factor, FP8_MAX, PTX), mask)
    if HAS_HP:
        tl.store(hp + cols, y, mask)


@triton.jit
def _factor(scale, scale_inv, amax, largest, MODE: tl.constexpr, RECORD: tl.constexpr, FP8_MAX: tl.constexpr):
    """Return a scale that covers more than this program: given, or from the amax of all. `largest` is recorded."""
    factor = 1.0
    if MODE == FROM_AMAX:
        factor, inverse = scale_from_amax(magnitude(tl.load(amax)), FP8_MAX)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, inverse)
    else:
        if MODE == AMAX or RECORD:
            record_amax(amax, largest)
        if MODE == GIVEN:
            factor = tl.load(scale)
            if largest >= INFINITY:
                tl.store(scale_inv, float("nan"))
    return factor


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax"])
def swiglu_kernel(
    gate,
    up,
    x_fp8,
    hp,
    scale,
    scale_inv,
    amax,
    num_cols,
    gate_stride,
    up_stride,
    MODE: tl.constexpr,
    RECORD: tl.constexpr,
    HAS_HP: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compute BLOCK columns of a row; rowwise, a whole row: in registers if it FITS, else read twice."""
    row, first = _place(num_cols, BLOCK, MODE)
    gate += row * gate_stride
    up += row * up_stride
    x_fp8 += row * num_cols
    hp += row * num_cols
    cols = first + tl.arange(0, BLOCK)
    if MODE == ROWWISE and not FITS:
        largest = 0
        while first < num_cols:
            h = _hidden(gate, up, first + tl.arange(0, BLOCK), num_cols, PTX)
            largest = tl.maximum(largest, _largest(h, PTX))
            first += BLOCK
        factor, inverse = row_scale_from_amax(largest, FP8_MAX)
        tl.store(scale_inv + row, inverse)
        first = 0
        while first < num_cols:
            cols = first + tl.arange(0, BLOCK)
            h = _hidden(gate, up, cols, num_cols, PTX)
            _store(x_fp8, hp, cols, num_cols, h, factor, HAS_HP, FP8_MAX, PTX)
            first += BLOCK
    else:
        h = _hidden(gate, up, cols, num_cols, PTX)
        largest = 0
        if MODE != FROM_AMAX:
            largest = _largest(h, PTX)
        if MODE == ROWWISE:
            factor, inverse = row_scale_from_amax(largest, FP8_MAX)
            tl.store(scale_inv + row, inverse)
        else:
            factor = _factor(scale, scale_inv, amax, largest, MODE, RECORD, FP8_MAX)
        if MODE != AMAX:
            _store(x_fp8, hp, cols, num_cols, h, factor, HAS_HP, FP8_MAX, PTX)


@triton.jit(
    do_not_specialize_on_alignment=["gate_scale", "gate_scale_inv", "gate_amax", "up_scale", "up_scale_inv", "up_amax"]
)
def swiglu_backward_kernel(
    grad_hidden,
    gate,
    up,
    gate_fp8,
    up_fp8,
    gate_hp,
    up_hp,
    gate_scale,
    gate_scale_inv,
    gate_amax,
    up_scale,
    up_scale_inv,
    up_amax,
    num_cols,
    grad_hidden_stride,
    gate_stride,
    up_stride,
    out_stride,
    MODE: tl.constexpr,
    HAS_HP: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compute the gradients as `swiglu_kernel` does the product, but not rowwise."""
    row, first = _place(num_cols, BLOCK, MODE)
    grad_hidden += row * grad_hidden_stride
    gate += row * gate_stride
    up += row * up_stride
    gate_fp8 += row * out_stride
    up_fp8 += row * out_stride
    gate_hp += row * out_stride
    up_hp += row * out_stride
    cols = first + tl.arange(0, BLOCK)
    mask = cols < num_cols
    grad = tl.load(grad_hidden + cols, mask, 0.0)
    grad_gate, grad_up = gradients(grad, tl.load(gate + cols, mask, 0.0), tl.load(up + cols, mask, 0.0), PTX)
    if MODE == BF16:
        tl.store(gate_hp + cols, grad_gate, mask)
        tl.store(up_hp + cols, grad_up, mask)
    else:
        gate_largest = 0
        up_largest = 0
        if MODE != FROM_AMAX:
            gate_largest = _largest(grad_gate, PTX)
            up_largest = _largest(grad_up, PTX)
        gate_factor = _factor(gate_scale, gate_scale_inv, gate_amax, gate_largest, MODE, True, FP8_MAX)
        up_factor = _factor(up_scale, up_scale_inv, up_amax, up_largest, MODE, True, FP8_MAX)
        if MODE != AMAX:
            _store(gate_fp8, gate_hp, cols, num_cols, grad_gate, gate_factor, HAS_HP, FP8_MAX, PTX)
            _store(up_fp8, up_hp, cols, num_cols, grad_up, up_factor, HAS_HP, FP8_MAX, PTX)
