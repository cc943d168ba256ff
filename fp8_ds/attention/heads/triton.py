"""The cast of queries, keys and values by the Triton kernels: two reads of each, the rotation in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fp8_ds.attention.heads.kernel import amax_kernel, dequantize_kernel, quantize_kernel
from fp8_ds.attention.rotation import rotation_matrices
from fp8_ds.formats import E4M3
from fp8_ds.ops._launch import ceil_div

_ELEMENTS = 8192
"""Of a tile: 64 a thread."""
_NUM_WARPS = 4


def _launch(x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[Any, dict[str, Any]]:
    """(grid, constants) for kernels over x."""
    padded = max(triton.next_power_of_2(x.shape[-1]), 16)
    rows = max(_ELEMENTS // padded, 16)
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    constants = {
        "GROUP": x.shape[-2] // num_kv_heads,
        "ROWS": rows,
        "DIM": padded,
        "PACKED": cu_seqlens is not None,
        "PTX": x.is_cuda and torch.version.hip is None,
        "num_warps": _NUM_WARPS,
    }
    return (ceil_div(longest, rows), sequences * num_kv_heads), constants


def _cast(
    x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None, max_seqlen: int, matrix: Tensor | None, amax: Tensor,
    scale_inv: Tensor,
) -> Tensor:  # fmt: skip
    """One of q, k and v in E4M3. amax: zeros, and scale_inv: float32 [sequences, kv heads], written."""
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
    """As `reference.quantize`; bf16 on CUDA, or on CPU under Triton's interpreter."""
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
    """As `reference.dequantize`."""
    x = torch.empty(x_fp8.shape, dtype=torch.bfloat16, device=x_fp8.device)
    num_kv_heads = scale_inv.shape[1]
    grid, constants = _launch(x_fp8, num_kv_heads, cu_seqlens, max_seqlen)
    sizes = (x_fp8.shape[1] if cu_seqlens is None else 0, x_fp8.shape[-1], num_kv_heads)
    ends = x_fp8.view(torch.uint8) if cu_seqlens is None else cu_seqlens
    dequantize_kernel[grid](x_fp8.view(torch.uint8), ends, scale_inv, x, *sizes, **constants)
    return x
