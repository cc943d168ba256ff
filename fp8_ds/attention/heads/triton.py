"""Queries, keys and values to E4M3 and back by Triton kernels: two reads of each, the rotation in registers.

Results have the same bits as `reference`, except for the order of the rotation's sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.attention.heads.reference import rotation_matrices
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._device import decode, magnitude, record_amax, runs_ptx, to_bf16, to_float
from fp8_ds.ops._device import quantize as cast_to_codes
from fp8_ds.ops._launch import ceil_div
from fp8_ds.ops.blockwise.kernel import _scales as pow2_scales

_E4M3_MAX = tl.constexpr(E4M3.max)
_E4M3_MAX_BITS = tl.constexpr(0x43E00000)
"""448 as a float32."""


@triton.jit
def _sequence(cu_seqlens, seqlen, stride_batch, stride_token, num_kv_heads, PACKED: tl.constexpr):
    """Return (tokens before it, its length, its offset in memory) of this program's sequence."""
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
    """Load bf16 [ROWS, DIM] of one head, rotated if ROTATE; 0 beyond the ends."""
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
    """Take the largest magnitude of ROWS tokens and the heads that share a key into `amax` [sequences, kv heads]."""
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
    """Cast the same tokens and heads by the power of two that `amax` allows. x_fp8: bytes, contiguous."""
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
            tl.store(x_fp8 + to, cast_to_codes(tile, scale, _E4M3_MAX, PTX), mask)


@triton.jit
def dequantize_kernel(
    x_fp8, cu_seqlens, scale_inv, x, seqlen, dim, num_kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Dequantize to bf16. x_fp8: bytes; both contiguous."""
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


_ELEMENTS = 8192
"""Elements of a tile: 64 a thread."""
_NUM_WARPS = 4


def _launch(x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[Any, dict[str, Any]]:
    """Return (grid, constants) for kernels over x."""
    padded = max(triton.next_power_of_2(x.shape[-1]), 16)
    rows = max(_ELEMENTS // padded, 16)
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    constants = {
        "GROUP": x.shape[-2] // num_kv_heads,
        "ROWS": rows,
        "DIM": padded,
        "PACKED": cu_seqlens is not None,
        "PTX": runs_ptx(x),
        "num_warps": _NUM_WARPS,
    }
    return (ceil_div(longest, rows), sequences * num_kv_heads), constants


def _cast(
    x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None, max_seqlen: int, matrix: Tensor | None, amax: Tensor,
    scale_inv: Tensor,
) -> Tensor:  # fmt: skip
    """Quantize one of q, k and v. `amax`, zeros, and scale_inv, both float32 [sequences, kv heads], are written."""
    x_fp8 = torch.empty(x.shape, dtype=E4M3.torch_dtype, device=x.device)
    grid, constants = _launch(x, num_kv_heads, cu_seqlens, max_seqlen)
    strides = (0 if cu_seqlens is not None else x.stride(0), x.stride(-3), x.stride(-2))
    sizes = (x.shape[1] if cu_seqlens is None else 0, x.shape[-1], num_kv_heads)
    ends = x if cu_seqlens is None else cu_seqlens
    constants["ROTATE"] = matrix is not None
    matrix = x if matrix is None else matrix
    amax_kernel[grid](x, matrix, ends, amax, *strides, *sizes, **constants)
    quantize_kernel[grid](x, matrix, ends, amax, x_fp8.view(torch.uint8), scale_inv, *strides, *sizes, **constants)
    return x_fp8


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Triton version of `reference.quantize`; bf16 on CUDA, or on CPU under Triton's interpreter."""
    num_kv_heads = k.shape[-2]
    sequences = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    amax = torch.zeros(3, sequences, num_kv_heads, dtype=torch.float32, device=q.device)
    descales = torch.empty_like(amax)
    matrices = rotation_matrices(q.shape[-1], q.device, q.dtype) if hadamard else (None, None)
    q_fp8 = _cast(q, num_kv_heads, cu_seqlens_q, max_seqlen_q, matrices[0], amax[0], descales[0])
    k_fp8 = _cast(k, num_kv_heads, cu_seqlens_k, max_seqlen_k, matrices[1], amax[1], descales[1])
    v_fp8 = _cast(v, num_kv_heads, cu_seqlens_k, max_seqlen_k, None, amax[2], descales[2])
    return q_fp8, k_fp8, v_fp8, descales


def dequantize(x_fp8: Tensor, scale_inv: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Tensor:
    """Triton version of `reference.dequantize`."""
    x = torch.empty(x_fp8.shape, dtype=torch.bfloat16, device=x_fp8.device)
    num_kv_heads = scale_inv.shape[1]
    grid, constants = _launch(x_fp8, num_kv_heads, cu_seqlens, max_seqlen)
    sizes = (x_fp8.shape[1] if cu_seqlens is None else 0, x_fp8.shape[-1], num_kv_heads)
    ends = x_fp8.view(torch.uint8) if cu_seqlens is None else cu_seqlens
    dequantize_kernel[grid](x_fp8.view(torch.uint8), ends, scale_inv, x, *sizes, **constants)
    return x
