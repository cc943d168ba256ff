"""Device code of `triton`; the same bits as `reference`.

Nothing is fused (`enable_fp_fusion=False`), roots and quotients are correctly rounded, subnormals are kept.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics import moments, rounding
from fp8_ds.numerics.formats import E4M3, E4M4
from fp8_ds.ops._device import to_bf16
from fp8_ds.ops.adamw.arithmetic import (
    DOWN,
    ENCODE_E4M11,
    STORE_SCALES,
    UP,
    as_float32,
    decode_bf16_master,
    decode_fp8_master,
    encode_master,
    encode_moments,
    group_scale_inv,
    largest_magnitude,
    mix,
    old_v,
    root_and_reciprocal,
    words_of,
)
from fp8_ds.ops.adamw.hyper import Hyper

_GROUP = tl.constexpr(moments.GROUP)
_M_MAX = tl.constexpr(E4M3.max)
_ROOT_MAX = tl.constexpr(E4M4.max)
_TINY = tl.constexpr(moments.TINY)
_TINY_ROOT = tl.constexpr(moments.TINY_ROOT)
_SMALLEST_V = tl.constexpr(moments.SMALLEST_V)
_ONE_TWICE = tl.constexpr(2 * (127 << 23))
"""The bits of a power of two in float32 subtracted from this are those of its inverse."""
_ENCODE_E4M11 = tl.constexpr(ENCODE_E4M11)
_STORE_SCALES = tl.constexpr(STORE_SCALES)

_WEYL = tl.constexpr(rounding.WEYL)
_SHARED = tl.constexpr(rounding.SHARED)
_STRIDE = tl.constexpr(rounding.STRIDE)
_MOMENT_FACTOR = tl.constexpr(rounding.MOMENT_FACTOR)

_LR = tl.constexpr(int(Hyper.LR))
_BETA1 = tl.constexpr(int(Hyper.BETA1))
_BETA2 = tl.constexpr(int(Hyper.BETA2))
_ONE_MINUS_BETA1 = tl.constexpr(int(Hyper.ONE_MINUS_BETA1))
_ONE_MINUS_BETA2 = tl.constexpr(int(Hyper.ONE_MINUS_BETA2))
_EPS = tl.constexpr(int(Hyper.EPS))
_DECAY = tl.constexpr(int(Hyper.DECAY))
_ROOT_FACTOR = tl.constexpr(int(Hyper.ROOT_FACTOR))
_BOUND = tl.constexpr(int(Hyper.BOUND))
_HYPER_WIDTH = tl.constexpr(int(Hyper.WIDTH))

COLUMNS = ("hi", "lo", "m", "v", "m_scale", "v_scale", "numel", "start", "param_id", "group", "scale", "first_block")
"""Columns of the table of pieces of shards, int64 [num_pieces, TABLE_WIDTH]."""

_HI, _LO, _M, _V, _M_SCALE, _V_SCALE, _NUMEL, _START, _PARAM_ID, _GROUP_ROW, _SCALE, _FIRST_BLOCK = (
    tl.constexpr(column) for column in range(len(COLUMNS))
)
TABLE_WIDTH = tl.constexpr(16)


# Compiled once whatever these are: strides, and tensors that may be views of others.
@triton.jit(
    do_not_specialize=["first_block", "seed_key", "scale_inv_stride", "next_scale_inv_stride"],
    do_not_specialize_on_alignment=["hyper", "step", "grad_scale", "skip", "scale_inv", "next_scale_inv", "amax"],
)
def adamw_kernel(
    table,
    grads,
    block_pieces,
    first_block,
    hyper,
    step,
    grad_scale,
    skip,
    scale_inv,
    scale_inv_stride,
    next_scale_inv,
    next_scale_inv_stride,
    amax,
    seed_key,
    GRAD_DTYPE: tl.constexpr,
    LO_BITS: tl.constexpr,
    DROP_BITS: tl.constexpr,
    MAX_MAG: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IS_FP8: tl.constexpr,
    DECOUPLED: tl.constexpr,
    IS_EDGE: tl.constexpr,
    VECTORS: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Update one block of shards that has a gradient. Args: as `StepInputs`, and the fields of `triton._Kind`."""
    skipped = tl.load(skip)  # asked about where the gradient is: the piece's number does not wait for it
    block = tl.program_id(0) + first_block
    piece = tl.load(block_pieces + block)
    grad_address = tl.load(grads + piece)
    if skipped != 0:
        return
    if grad_address == 0:
        return

    row = table + piece * TABLE_WIDTH
    numel = tl.load(row + _NUMEL)
    start = tl.load(row + _START)
    head = start % _GROUP
    m_ptr = tl.load(row + _M).to(tl.pointer_type(tl.uint8))
    v_ptr = tl.load(row + _V).to(tl.pointer_type(tl.uint8))
    m_scale_ptr = tl.load(row + _M_SCALE).to(tl.pointer_type(tl.float32))
    v_scale_ptr = tl.load(row + _V_SCALE).to(tl.pointer_type(tl.float32))
    grad_ptr = grad_address.to(tl.pointer_type(GRAD_DTYPE))
    if IS_FP8:
        hi_ptr = tl.load(row + _HI).to(tl.pointer_type(tl.uint8))
    elif LO_BITS == 0:
        hi_ptr = tl.load(row + _HI).to(tl.pointer_type(tl.float32))
    else:
        hi_ptr = tl.load(row + _HI).to(tl.pointer_type(tl.int16))
    if LO_BITS == 16:
        lo_ptr = tl.load(row + _LO).to(tl.pointer_type(tl.int16))
    else:
        lo_ptr = tl.load(row + _LO).to(tl.pointer_type(tl.int8))

    group_row = tl.load(row + _GROUP_ROW)
    numbers = hyper + group_row * _HYPER_WIDTH
    lr = tl.load(numbers + _LR)
    beta1 = tl.load(numbers + _BETA1)
    beta2 = tl.load(numbers + _BETA2)
    one_minus_beta1 = tl.load(numbers + _ONE_MINUS_BETA1)
    one_minus_beta2 = tl.load(numbers + _ONE_MINUS_BETA2)
    eps = tl.load(numbers + _EPS)
    decay = tl.load(numbers + _DECAY)
    root_factor = tl.load(numbers + _ROOT_FACTOR)
    bound = tl.load(numbers + _BOUND)
    grad_factor = tl.load(grad_scale)
    if IS_FP8:
        scale_index = tl.load(row + _SCALE)
        old_scale_inv = tl.load(scale_inv + scale_index * scale_inv_stride)
        new_scale_inv = tl.load(next_scale_inv + scale_index * next_scale_inv_stride)
        new_scale = tl.div_rn(1.0, new_scale_inv)
        # The weight is worked on in units of its new scale_inv, or of `rest` times that, where the ratio would leave
        # float32's range. All these factors are powers of two: nothing rounds.
        ratio = old_scale_inv * new_scale
        rest = tl.where(ratio > 64.0, ratio * (1.0 / 64.0), 1.0)
        raise_by = tl.minimum(ratio, 64.0) * UP
        lower_by = rest * DOWN
        inverse = (-rest.to(tl.int32, bitcast=True) + _ONE_TWICE).to(tl.float32, bitcast=True)
        lr = lr * (new_scale * inverse)
        if DECOUPLED:
            raise_by = raise_by * decay
        else:
            decay = decay * (new_scale_inv * rest)
    first = mix(seed_key.to(tl.uint32) + tl.load(row + _PARAM_ID).to(tl.uint32))
    second = mix(first ^ 0xC2B2AE35)
    twist = second ^ (second >> 15)
    moved = tl.load(step + group_row).to(tl.uint32) * _STRIDE
    # Elements of a pack of four are neighbours then.
    PACKED: tl.constexpr = PTX and VECTORS >= 2 and not IS_EDGE

    num_groups = (head + numel + _GROUP - 1) // _GROUP
    begin = (block - tl.load(row + _FIRST_BLOCK)) * (ROWS * NUM_TILES)
    # Where a thread begins; in the loop one number is added to all of these.
    rows = tl.arange(0, ROWS)
    lanes = rows[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    offset = begin * _GROUP
    m_at = m_ptr + offset
    v_at = v_ptr + offset
    lo_at = lo_ptr + offset
    hi_at = hi_ptr + (offset - head)
    grad_at = grad_ptr + (offset - head)
    if VECTORS >= 1:
        m_at = tl.multiple_of(m_at, 16)
        v_at = tl.multiple_of(v_at, 16)
        lo_at = tl.multiple_of(lo_at, 16)
    if VECTORS >= 2:
        hi_at = tl.multiple_of(hi_at, 16)
        grad_at = tl.multiple_of(grad_at, 16)
    m_at += lanes
    v_at += lanes
    lo_at += lanes
    hi_at += lanes
    grad_at += lanes
    m_scale_at = m_scale_ptr + begin + rows
    v_scale_at = v_scale_ptr + begin + rows
    # Elements count from the weight's first; groups of 128 do too, so no shard's head splits the eight of a hash.
    octets = rows[:, None] * (_GROUP // _SHARED) + tl.arange(0, _GROUP // _SHARED)[None, :]
    keys = octets.to(tl.uint32) * _WEYL
    first_octet = ((start - head + offset) // _SHARED).to(tl.uint32)

    num_rows = tl.minimum(num_groups - begin, ROWS * NUM_TILES).to(tl.int32)
    largest = tl.zeros([ROWS, 8], tl.int32)
    done = 0
    while done < num_rows:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
        at = tl.multiple_of(done * _GROUP, _GROUP)
        if IS_EDGE:
            row_mask = done + rows < num_rows
            pad_mask = row_mask[:, None] & (lanes >= 0)
            inside = lanes + (offset + at)
            mask = (inside >= head) & (inside < head + numel)
        else:  # whole tiles
            row_mask = None
            pad_mask = None
            mask = None
        other = 0 if IS_EDGE else None
        grad = tl.load(grad_at + at, mask, 0.0 if IS_EDGE else None)
        hi = tl.load(hi_at + at, mask, other)
        if LO_BITS > 0:
            lo = tl.load(lo_at + at, mask, other)
        m_code = tl.load(m_at + at, mask, other)
        root_code = tl.load(v_at + at, mask, other)
        m_scale_inv = tl.load(m_scale_at + done, row_mask)
        root_scale_inv = tl.load(v_scale_at + done, row_mask)

        if IS_FP8:
            w = decode_fp8_master(hi, lo, LO_BITS, DROP_BITS, PTX) * raise_by
        elif LO_BITS == 0:
            w = hi
        else:
            w = decode_bf16_master(hi, lo, LO_BITS, DROP_BITS)
        g = as_float32(grad, PACKED) * grad_factor
        if not DECOUPLED:
            g = g + w * decay
        m_old = m_code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        m = m_old * (beta1 * m_scale_inv)[:, None] + one_minus_beta1 * g
        v = old_v(root_code, beta2 * (root_scale_inv * root_scale_inv), PTX) + one_minus_beta2 * (g * g)
        v = tl.maximum(v, _SMALLEST_V)
        root, reciprocal = root_and_reciprocal(v, root_factor, eps, PTX)
        update = m * reciprocal
        update = tl.maximum(update, -bound, propagate_nan=tl.PropagateNan.ALL)
        update = tl.minimum(update, bound, propagate_nan=tl.PropagateNan.ALL)
        if DECOUPLED and not IS_FP8:
            w = w * decay
        w = w - lr * update

        octet = first_octet + (done * (_GROUP // _SHARED)).to(tl.uint32)
        words = words_of(keys + (octet * _WEYL + first), twist, moved)
        if LO_BITS == 0:
            tl.store(hi_at + at, w, mask)
        else:
            random = words if STOCHASTIC else None
            if IS_FP8:
                w = w * lower_by
                if PACKED and LO_BITS == 8 and STOCHASTIC:
                    new_hi, new_lo, mag = tl.inline_asm_elementwise(
                        _ENCODE_E4M11,
                        "=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
                        [w, tl.interleave(random, random)],
                        (tl.uint8, tl.int8, tl.int32),
                        is_pure=True,
                        pack=4,
                    )
                else:
                    new_hi, new_lo, mag = encode_master(w, random, LO_BITS, DROP_BITS, MAX_MAG, 8)
                    mag = mag << (24 - LO_BITS)
                if IS_EDGE:
                    mag = tl.where(mask, mag, 0)
                mag = tl.max(tl.reshape(mag, [ROWS, 8, _GROUP // 8]), 2)  # in a thread's registers
                largest = tl.maximum(largest, mag)
                tl.store(hi_at + at, new_hi.to(tl.uint8), mask)
            else:
                new_hi, new_lo, mag = encode_master(w, random, LO_BITS, DROP_BITS, MAX_MAG, 16)
                tl.store(hi_at + at, new_hi.to(tl.int16), mask)
            tl.store(lo_at + at, new_lo.to(tl.int16 if LO_BITS == 16 else tl.int8), mask)

        m_scale_inv, m_scale = group_scale_inv(largest_magnitude(m), _M_MAX, _TINY, PTX)
        if IS_EDGE:
            root = tl.where(mask, root, 0.0)
        # Floats that are not negative compare as their bits do.
        largest_root = tl.max(root.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        root_scale_inv, root_scale = group_scale_inv(largest_root, _ROOT_MAX, _TINY_ROOT, PTX)
        m_code, root_code = encode_moments(
            m * m_scale[:, None], root * root_scale[:, None], words * _MOMENT_FACTOR, PACKED
        )
        tl.store(m_at + at, m_code, pad_mask)
        tl.store(v_at + at, root_code, pad_mask)
        if PTX and not IS_EDGE:
            # By all threads that hold the group, the same value: tl.store would pass it through shared memory.
            tl.inline_asm_elementwise(
                _STORE_SCALES,
                "=r,l,f,l,f",
                [(m_scale_at + done).to(tl.int64), m_scale_inv, (v_scale_at + done).to(tl.int64), root_scale_inv],
                tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.store(m_scale_at + done, m_scale_inv, row_mask)
            tl.store(v_scale_at + done, root_scale_inv, row_mask)
        done += ROWS

    if IS_FP8:
        mag = tl.max(largest) >> (24 - LO_BITS)
        value = ((mag << DROP_BITS).to(tl.float32, bitcast=True) * UP) * new_scale_inv
        at = (amax + scale_index).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(at, value.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale_inv"])
def decode_kernel(
    hi, lo, scale_inv, out, numel,
    LO_BITS: tl.constexpr, DROP_BITS: tl.constexpr, IS_FP8: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode BLOCK elements by one program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    high = tl.load(hi + at, mask, 0)
    low = tl.load(lo + at, mask, 0)
    if IS_FP8:
        value = (decode_fp8_master(high, low, LO_BITS, DROP_BITS, False) * UP) * tl.load(scale_inv)
    else:
        value = decode_bf16_master(high, low, LO_BITS, DROP_BITS)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bf16(value, PTX), mask)
    else:
        tl.store(out + at, value, mask)
