"""Queries, keys and values to E4M3 and back in plain torch: the reference of the kernels, also used on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.attention.rotation import rotate
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.blockwise.reference import scale_from_amax


def _sequence_of(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence of each token, int64 [tokens]."""
    places = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)


def amax_heads(x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return largest magnitudes, float32 [sequences, kv heads]; 0 for an empty sequence, NaN where there is one."""
    of_tokens = x.unflatten(-2, (num_kv_heads, -1)).abs().amax((-2, -1)).float()
    if cu_seqlens is None:
        return of_tokens.amax(1)
    amax = of_tokens.new_zeros(len(cu_seqlens) - 1, num_kv_heads)
    at = _sequence_of(len(x), cu_seqlens)[:, None].expand_as(of_tokens)
    return amax.scatter_reduce(0, at, of_tokens, "amax")


def _per_head(scale: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reshape [sequences, kv heads] to a factor that broadcasts against x, grouped by kv head."""
    if cu_seqlens is None:
        return scale[:, None, :, None, None]
    return scale[_sequence_of(len(x), cu_seqlens)][:, :, None, None]


def quantize_head_groups(x: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize one of q, k and v; return (x_fp8, scale_inv [sequences, kv heads])."""
    scale, scale_inv = scale_from_amax(amax_heads(x, num_kv_heads, cu_seqlens), E4M3.max)
    grouped = x.unflatten(-2, (num_kv_heads, -1)).float()
    # Infinities saturate here; their scale_inv is NaN, as for NaN.
    scaled = (grouped * _per_head(scale, x, cu_seqlens)).clamp(-E4M3.max, E4M3.max)
    return scaled.to(E4M3.torch_dtype).flatten(-3, -2).contiguous(), scale_inv


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
    if hadamard:
        q, k = rotate(q, is_query=True), rotate(k, is_query=False)
    num_kv_heads = k.shape[-2]
    q_fp8, q_scale_inv = quantize_head_groups(q, num_kv_heads, cu_seqlens_q)
    k_fp8, k_scale_inv = quantize_head_groups(k, num_kv_heads, cu_seqlens_k)
    v_fp8, v_scale_inv = quantize_head_groups(v, num_kv_heads, cu_seqlens_k)
    return q_fp8, k_fp8, v_fp8, torch.stack([q_scale_inv, k_scale_inv, v_scale_inv])


def dequantize(x_fp8: Tensor, scale_inv: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Tensor:
    grouped = x_fp8.unflatten(-2, (scale_inv.shape[1], -1)).float()
    return (grouped * _per_head(scale_inv, x_fp8, cu_seqlens)).to(torch.bfloat16).flatten(-3, -2)
