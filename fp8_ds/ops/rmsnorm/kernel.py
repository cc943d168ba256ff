"""Device code of `rmsnorm.triton`; sums in the order of `reference`, nothing fused, so the same bits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops._device import (
    AMAX,
    FROM_AMAX,
    GIVEN,
    INFINITY,
    NAN,
    ROWWISE,
    magnitude,
    quantize,
    record_amax,
    row_scale_from_amax,
    scale_from_amax,
    to_bf16,
    to_float,
)
from fp8_ds.ops.rmsnorm import reference

_LANES = tl.constexpr(reference.PARTIAL_LANES)


@triton.jit
def _row_mean(x, num_cols, BLOCK: tl.constexpr):
    """Compute `reference._mean` of one row, float32 [BLOCK], zeros beyond num_cols."""
    eights = x
    for level in tl.static_range(3):
        even, odd = tl.split(tl.reshape(eights, [BLOCK >> (level + 1), 2]))
        eights = even + odd
    # `* 1.0`, since Triton makes a constant of an argument that is 1, which has no `.to`.
    return tl.div_rn(tl.sum(eights.to(tl.float64)).to(tl.float32), num_cols * 1.0)


@triton.jit
def _in_bf16(bits):
    """Round the bits of a float32 >= 0 or a NaN to what bf16 holds, nearest even; any NaN becomes the plain one."""
    return tl.where(bits > INFINITY, NAN, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16)


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax"])
def rmsnorm_rows_kernel(
    x,
    weight,
    x_fp8,
    hp,
    rstd,
    scale,
    scale_inv,
    amax,
    num_rows,
    num_cols,
    x_stride,
    eps,
    MODE: tl.constexpr,
    RECORD: tl.constexpr,
    TWICE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compute modes GIVEN and ROWWISE; programs take rows in turn, one in registers and one being loaded.

    The weight is read once. With a given scale, only the mean of a row is reduced: maxima wait for the last row.
    """
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    w = tl.load(weight + cols, mask, 0.0)
    factor = tl.load(scale) if MODE == GIVEN else 1.0
    largest = tl.zeros([BLOCK // 8], tl.int32)
    row = tl.program_id(0).to(tl.int64)
    next_x = tl.load(x + row * x_stride + cols, mask, 0.0)
    while row < num_rows:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
        y = to_float(next_x, PTX)
        ahead = row + tl.num_programs(0)
        next_x = tl.load(x + ahead * x_stride + cols, cols < tl.where(ahead < num_rows, num_cols, 0), 0.0)
        inverse_root = tl.div_rn(1.0, tl.sqrt_rn(_row_mean(y * y, num_cols, BLOCK) + eps))
        tl.store(rstd + row, inverse_root)
        y = y * inverse_root
        if TWICE:
            y = to_float(to_bf16(y, PTX), PTX)
        wide = y * to_float(w, PTX)
        found = tl.max(tl.reshape(magnitude(wide), [BLOCK // 8, 8]), 1)
        if MODE == ROWWISE:
            factor, inverse = row_scale_from_amax(_in_bf16(tl.max(found)), FP8_MAX)
            tl.store(scale_inv + row, inverse)
        else:
            largest = tl.maximum(largest, found)
        y = to_bf16(wide, PTX)
        out = row * num_cols + cols
        tl.store(x_fp8 + out, quantize(y, factor, FP8_MAX, PTX), mask)
        tl.store(hp + out, y, mask)
        row = ahead
    if MODE == GIVEN:
        of_all = _in_bf16(tl.max(largest))
        if RECORD:
            record_amax(amax, of_all)
        if of_all >= INFINITY:
            tl.store(scale_inv, float("nan"))


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax"])
def rmsnorm_kernel(
    x,
    weight,
    x_fp8,
    hp,
    rstd,
    scale_inv,
    amax,
    num_cols,
    x_stride,
    eps,
    MODE: tl.constexpr,
    TWICE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compute the passes of tensorwise, AMAX and FROM_AMAX; one program a row. Pointers of the other pass are not read.

    No row is loaded ahead: one pass stores no row, the other sums none, so that neither has so much to wait for.
    """
    row = tl.program_id(0).to(tl.int64)
    if MODE == FROM_AMAX:
        # Backwards: what the first pass read last is still in the L2 cache.
        row = tl.num_programs(0) - 1 - row
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    y = to_float(tl.load(x + row * x_stride + cols, mask, 0.0), PTX)
    w = to_float(tl.load(weight + cols, mask, 0.0), PTX)
    if MODE == FROM_AMAX:
        inverse_root = tl.load(rstd + row)
    else:
        inverse_root = tl.div_rn(1.0, tl.sqrt_rn(_row_mean(y * y, num_cols, BLOCK) + eps))
        tl.store(rstd + row, inverse_root)
    y = y * inverse_root
    if TWICE:
        y = to_float(to_bf16(y, PTX), PTX)
    y = to_bf16(y * w, PTX)

    if MODE == AMAX:
        record_amax(amax, tl.max(magnitude(to_float(y, PTX))))
    else:
        factor, inverse = scale_from_amax(magnitude(tl.load(amax)), FP8_MAX)
        if row == 0:
            tl.store(scale_inv, inverse)
        out = row * num_cols + cols
        tl.store(x_fp8 + out, quantize(y, factor, FP8_MAX, PTX), mask)
        tl.store(hp + out, y, mask)


@triton.jit
def _load_ahead(grad_output, x, rstd, row, cols, num_rows, num_cols, grad_output_stride, x_stride):
    """Load a row of both, and its rstd; zeros where there is none."""
    exists = row < num_rows
    mask = cols < tl.where(exists, num_cols, 0)
    grad = tl.load(grad_output + row * grad_output_stride + cols, mask, 0.0)
    return grad, tl.load(x + row * x_stride + cols, mask, 0.0), tl.load(rstd + row, exists, 0.0)


@triton.jit
def rmsnorm_backward_kernel(
    grad_output,
    x,
    weight,
    rstd,
    grad_x,
    partial,
    num_rows,
    rows_per_partial,
    num_cols,
    grad_output_stride,
    x_stride,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compute grad_x and partial sums of grad_weight, float32 [ceil(num_rows / rows_per_partial), num_cols].

    Programs take partial sums in turn, at least one each. The next row is being loaded while one is worked on, the
    first of the next partial sum too.
    """
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    w = tl.load(weight + cols, mask, 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    part = tl.program_id(0).to(tl.int64)
    row = part * rows_per_partial
    left = rows_per_partial - 1  # rows of this partial sum that come after this one
    next_grad, next_x, next_root = _load_ahead(
        grad_output, x, rstd, row, cols, num_rows, num_cols, grad_output_stride, x_stride
    )
    while row < num_rows:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
        grad = to_float(next_grad, PTX)
        inverse_root = next_root
        normed = to_float(next_x, PTX) * inverse_root
        is_last = left == 0
        ahead = row + 1 + tl.where(is_last, (tl.num_programs(0) - 1) * rows_per_partial, 0)
        next_grad, next_x, next_root = _load_ahead(
            grad_output, x, rstd, ahead, cols, num_rows, num_cols, grad_output_stride, x_stride
        )
        total = total + grad * normed
        grad = grad * to_float(w, PTX)
        grad = (grad - normed * _row_mean(grad * normed, num_cols, BLOCK)) * inverse_root
        tl.store(grad_x + row * num_cols + cols, to_bf16(grad, PTX), mask)
        if is_last | (row + 1 == num_rows):
            tl.store(partial + part * num_cols + cols, total, mask)
            total = tl.zeros([BLOCK], tl.float32)
            part += tl.num_programs(0)
        left = tl.where(is_last, rows_per_partial, left) - 1
        row = ahead


@triton.jit
def sum_partials_kernel(partial, total, num_partials, num_cols, STEPS: tl.constexpr, COLS: tl.constexpr):
    """Compute `reference.sum_partials`, STEPS in each lane; all loads of a lane start before the first addition."""
    lanes = tl.arange(0, _LANES)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = cols < num_cols
    sums = tl.zeros([_LANES, COLS], tl.float32)
    for step in tl.static_range(STEPS):
        rows = step * _LANES + lanes
        at = partial + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
        sums = sums + tl.load(at, (rows < num_partials)[:, None] & mask[None, :], 0.0)
    tl.store(total + cols, tl.sum(sums.to(tl.float64), axis=0).to(tl.float32), mask)
