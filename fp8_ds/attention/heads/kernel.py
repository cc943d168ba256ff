"""The device code of `heads.triton`: the amaxes of heads, their cast, the way back; the same bits as `reference`, with
the rotation but for the order of its sums."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.formats import E4M3
from fp8_ds.ops._device import decode, magnitude, record_amax
from fp8_ds.ops._producer_device import quantize, to_bf16, to_float
from fp8_ds.ops.blockwise.kernel import _scales as pow2_scales

_E4M3_MAX = tl.constexpr(E4M3.max)
_E4M3_MAX_BITS = tl.constexpr(0x43E00000)
"""448 as a float32."""


@triton.jit
def _sequence(cu_seqlens, seqlen, stride_batch, stride_token, num_kv_heads, PACKED: tl.constexpr):
    """Of this program's: (the tokens before it, its length, where it begins in memory)."""
    sequence = tl.program_id(1) // num_kv_heads
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
        begin = start * stride_token
    else:
        start = sequence.to(tl.int64) * seqlen
        length = seqlen
        begin = sequence.to(tl.int64) * stride_batch
    return start, length, begin


@triton.jit
def _tile(x, begin, stride_token, stride_head, head, rows, cols, length, dim, matrix, ROTATE: tl.constexpr,
          PTX: tl.constexpr):  # fmt: skip
    """bf16 [ROWS, DIM] of one head, rotated if so; 0 beyond the ends."""
    mask = (rows < length)[:, None] & (cols < dim)[None, :]
    at = begin + rows[:, None].to(tl.int64) * stride_token + head * stride_head + cols[None, :]
    tile = tl.load(x + at, mask, 0.0)
    if ROTATE:
        signs = tl.load(matrix + cols[:, None] * dim + cols[None, :])
        if PTX:
            turned = tl.dot(tile, signs)
        else:  # the interpreter multiplies the bits of bf16
            turned = tl.dot(to_float(tile, PTX), to_float(signs, PTX))
        tile = to_bf16(turned, PTX)
    return tile


@triton.jit
def amax_kernel(
    x, matrix, cu_seqlens, amax, stride_batch, stride_token, stride_head, seqlen, dim, num_kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, ROTATE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of the heads that share a key: their largest magnitude goes into `amax` [sequences, kv heads]."""
    _, length, begin = _sequence(cu_seqlens, seqlen, stride_batch, stride_token, num_kv_heads, PACKED)
    if tl.program_id(0) * ROWS < length:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, DIM)
        kv_head = tl.program_id(1) % num_kv_heads
        largest = tl.zeros((ROWS, DIM), tl.int32)
        for i in range(GROUP):
            head = kv_head * GROUP + i
            tile = _tile(x, begin, stride_token, stride_head, head, rows, cols, length, dim, matrix, ROTATE, PTX)
            largest = tl.maximum(largest, magnitude(to_float(tile, PTX)))
        record_amax(amax + tl.program_id(1), tl.max(tl.max(largest, 1), 0))


@triton.jit
def quantize_kernel(
    x, matrix, cu_seqlens, amax, x_fp8, scale_inv, stride_batch, stride_token, stride_head, seqlen, dim, num_kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, ROTATE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The same tokens and heads cast by the power of two that `amax` allows. x_fp8: bytes, contiguous."""
    start, length, begin = _sequence(cu_seqlens, seqlen, stride_batch, stride_token, num_kv_heads, PACKED)
    scale, inverse = pow2_scales(tl.load(amax.to(tl.pointer_type(tl.int32), bitcast=True) + tl.program_id(1)),
                                 _E4M3_MAX_BITS)  # fmt: skip
    tl.store(scale_inv + tl.program_id(1), inverse, tl.program_id(0) == 0)
    if tl.program_id(0) * ROWS < length:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, DIM)
        mask = (rows < length)[:, None] & (cols < dim)[None, :]
        kv_head = tl.program_id(1) % num_kv_heads
        for i in range(GROUP):
            head = kv_head * GROUP + i
            tile = _tile(x, begin, stride_token, stride_head, head, rows, cols, length, dim, matrix, ROTATE, PTX)
            to = ((start + rows)[:, None] * (num_kv_heads * GROUP) + head) * dim + cols[None, :]
            tl.store(x_fp8 + to, quantize(tile, scale, _E4M3_MAX, PTX), mask)


@triton.jit
def dequantize_kernel(
    x_fp8, cu_seqlens, scale_inv, x, seqlen, dim, num_kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The way back, to bf16. x_fp8: bytes; both contiguous."""
    start, length, _ = _sequence(cu_seqlens, seqlen, 0, 0, num_kv_heads, PACKED)
    if tl.program_id(0) * ROWS < length:
        factor = tl.load(scale_inv + tl.program_id(1))
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, DIM)
        mask = (rows < length)[:, None] & (cols < dim)[None, :]
        kv_head = tl.program_id(1) % num_kv_heads
        for i in range(GROUP):
            at = ((start + rows)[:, None] * (num_kv_heads * GROUP) + kv_head * GROUP + i) * dim + cols[None, :]
            value = decode(tl.load(x_fp8 + at, mask, 0), True, PTX) * factor
            tl.store(x + at, to_bf16(value, PTX), mask)
