"""The FP8 GEMM by `torch._scaled_mm` (cuBLASLt on CUDA, oneDNN or a plain loop on CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

ALIGNMENT = 16
"""`_scaled_mm` on CUDA wants the contracted dim and the columns of the result in multiples of 16 elements.
Source: the shape checks on mat1 and mat2 in pytorch aten/src/ATen/native/cuda (_scaled_mm_out_cuda)."""
_CPU_HAS_ROWS = TorchVersion(torch.__version__) >= "2.13"
"""Whether a CPU product takes a scale per row: torch 2.11's takes one for all, and ends in an assertion with more."""


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Let products of this process use torch's own kernels instead of oneDNN; the flag is one for all threads."""
    was_on = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags does the same, and warns about TF32
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_on)


def _product(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, **options: Any) -> Tensor:
    """Compute `torch._scaled_mm(a, b.t())`.

    On a CPU it does not use oneDNN: where there is AMX torch 2.13 gives it E4M3 by E4M3, for which oneDNN 3.x has its
    reference loop alone, 80 to 1,400 times slower than the same product in float32 (64 to 1024 rows; ONEDNN_VERBOSE=1
    says `ref:any`). The bits are the same.
    """
    with nullcontext() if a.is_cuda else _without_onednn():
        output: Tensor = torch._scaled_mm(
            a, b.t(), scale_a=_aligned(scale_inv_a), scale_b=_aligned(scale_inv_b), **options
        )
    return output


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def k_major(x: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """Return `x` row by row in memory, zero-padded to [num_rows, num_cols]; no copy where it is that already."""
    if tuple(x.shape) == (num_rows, num_cols):
        return x.contiguous()
    padded = torch.zeros(num_rows, num_cols, dtype=torch.uint8, device=x.device)
    padded[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)  # byte 0 is +0 in every FP8 format
    return padded.view(x.dtype)


def _aligned(scale_inv: Tensor) -> Tensor:
    """Return `scale_inv` where cuBLASLt can read it: a view off the 16-byte grid is copied (see `scale_vector`)."""
    return scale_inv if scale_inv.data_ptr() % 16 == 0 else scale_inv.clone()


def _row_vectors(a: Tensor, b: Tensor, num_m: int, padded_n: int) -> tuple[Tensor, Tensor]:
    """Return scales for the rowwise product, [M, 1] and [1, padded_n]; one for all goes into the other's vector."""
    if a.dim() == 0:
        a, b = torch.ones(num_m, 1, dtype=torch.float32, device=b.device), a * b
    elif b.dim() == 0:
        a, b = a * b, torch.ones(padded_n, 1, dtype=torch.float32, device=a.device)
    if len(b) < padded_n:
        b = torch.cat([b, b.new_ones(padded_n - len(b), 1)])
    return a.contiguous(), b.reshape(1, padded_n)


def _rowwise(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Multiply padded operands. torch's rowwise product gives bf16 only; others come unscaled in float32."""
    row_a, row_b = _row_vectors(scale_inv_a, scale_inv_b, len(a), len(b))
    if out_dtype == torch.bfloat16 and (a.is_cuda or _CPU_HAS_ROWS):
        return _product(a, b, row_a, row_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    one = torch.ones((), dtype=torch.float32, device=a.device)
    unscaled = _product(a, b, one, one, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
    return (unscaled * row_a * row_b).to(out_dtype)


def scaled_mm(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Compute `a @ b.T` of [M, K] and [N, K]: Hopper's FP8 GEMM reads both operands along K.

    The padding is the same on CPU, which does not need it, so that CPU tests meet it.
    """
    num_m, num_k = a.shape
    num_n = b.shape[0]
    if num_m == 0 or num_n == 0 or num_k == 0:
        # CUDA refuses empty operands, and the CPU leaves memory unset for K = 0.
        return torch.zeros(num_m, num_n, dtype=out_dtype, device=a.device)
    aligned_k, aligned_n = _align(num_k), _align(num_n)
    a, b = k_major(a, num_m, aligned_k), k_major(b, aligned_n, aligned_k)
    if scale_inv_a.dim() == scale_inv_b.dim() == 0:
        output = _product(a, b, scale_inv_a, scale_inv_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    else:
        output = _rowwise(a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)
    return output if aligned_n == num_n else output[:, :num_n].contiguous()
