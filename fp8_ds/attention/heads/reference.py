"""Queries, keys and values to E4M3 and back in plain torch: the reference of the kernels, also used on CPU.

A Hadamard rotation of queries and keys before that keeps the scores and spreads outliers of single channels over all.
Source: "incoherent processing" of FlashAttention-3 (Shah et al., arXiv 2407.08608, section 3.3), with its random signs
before the transform, so that what all channels share does not gather in one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._register import register
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


_SEED = 2407
"""Seed of the signs, a constant: the scores are the same for every seed, their rounding is not."""


def check_rotation(head_dim: int) -> None:
    """Raise UnsupportedError unless a Hadamard matrix of this size is available."""
    if head_dim < 1 or head_dim & (head_dim - 1):
        raise UnsupportedError(
            f"head dim: expected a power of two with the Hadamard rotation, got {head_dim}. Turn `hadamard` off."
        )


@functools.cache
def rotation_matrices(dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices [dim, dim] for q and k: signs times a power of two, exact in any dtype; q's times k's.T is one."""
    bits = dim.bit_length() - 1
    matrix = torch.ones(1, 1, dtype=torch.float32)
    for _ in range(bits):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(_SEED)) * 2 - 1
    signed = (signs[:, None] * matrix).to(device, dtype)
    return signed * 2.0 ** -((bits + 1) // 2), signed * 2.0 ** -(bits // 2)


def _rotate(x: Tensor, is_query: bool, transposed: bool) -> Tensor:
    matrix = rotation_matrices(x.shape[-1], x.device, x.dtype)[0 if is_query else 1]
    return x @ (matrix.t() if transposed else matrix)


_rotate_op = register(
    "attention_rotate(Tensor x, bool is_query, bool transposed) -> Tensor",
    _rotate,
    lambda x, is_query, transposed: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def rotate(x: Tensor, *, is_query: bool, transposed: bool = False) -> Tensor:
    """Rotate `x` along its last dim, times 2**-0.5 for queries and 2**0.5 for keys where log2 of that dim is odd.

    Scores of rotated queries and keys are those of the queries and keys, up to the rounding to x's dtype. `transposed`
    makes the gradient of `x` from that of `rotate(x)`.
    """
    return _rotate_op(x, is_query, transposed)
