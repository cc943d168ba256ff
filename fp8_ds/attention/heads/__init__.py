"""Quantisation of queries, keys and values to E4M3 with one scale for each sequence and key/value head, and back.

Scales are powers of two: bf16 holds every code times its scale, so the values that the backward multiplies are exactly
those that the forward has seen. E4M3 has an exponent of its own, so only its subnormal end loses by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.attention.heads import reference
from fp8_ds.attention.shapes import Packing
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._register import is_on_cuda, register_pair

__all__ = ["dequantize", "quantize"]


def _use_triton(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> bool:
    return all(is_on_cuda(x) and x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (q, k, v))


def _fake_quantize(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    codes = (torch.empty(x.shape, dtype=E4M3.torch_dtype, device=x.device) for x in (q, k, v))
    return *codes, torch.empty(3, sequences, k.shape[-2], dtype=torch.float32, device=q.device)


_quantize_op = register_pair(
    "attention_quantize(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool hadamard) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.quantize,
    _fake_quantize,
    use_triton=_use_triton,
)
_dequantize_op = register_pair(
    "attention_dequantize(Tensor x_fp8, Tensor scale_inv, Tensor? cu_seqlens, SymInt max_seqlen) -> Tensor",
    reference.dequantize,
    lambda x_fp8, scale_inv, cu_seqlens, max_seqlen: torch.empty(
        x_fp8.shape, dtype=torch.bfloat16, device=x_fp8.device
    ),
)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, *, hadamard: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize q, k and v to E4M3, by the largest power of two that each sequence's and key/value head's amax allows.

    Heads of q that share a key share a scale, as FlashAttention-3 requires (hopper/flash_api.cpp: `q_descale` is
    (batch, heads of k)).

    Args:
        q, k, v: [batch, sequence, heads, dim], or [tokens, heads, dim] with `packing`; any strides.
        hadamard: whether q and k are rotated first (reference.py), rounded to their dtype.

    Returns:
        (q_fp8, k_fp8, v_fp8, descales): float8_e4m3fn, contiguous; float32 [3, sequences, kv heads], multiply to leave
        FP8, NaN where a head is not finite.
    """
    packed = (None, None, 0, 0) if packing is None else packing.flat()
    return _quantize_op(q, k, v, *packed, hadamard)


def dequantize(x_fp8: Tensor, scale_inv: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Tensor:
    """Compute in bf16 one of the tensors that `quantize` returned times `scale_inv`, its row of the descales, exactly
    where bf16 holds the product as a normal number. Without packed sequences `cu_seqlens` is None."""
    return _dequantize_op(x_fp8, scale_inv, cu_seqlens, max_seqlen)
