"""Attention that others differentiate: torch's SDPA, cuDNN through it, FlexAttention, the flash-attn package."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from fp8_ds.attention.packages import find_fa2
from fp8_ds.attention.shapes import UNLIMITED, Geometry, Packing


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """By torch, which picks a kernel. A window costs a bool mask [m, n], packed sequences a call and a copy to the
    host each."""
    return _sdpa(q, k, v, geometry, ())


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """By torch with cuDNN's kernel or not at all. Windows and packed sequences as in `sdpa_attention`."""
    return _sdpa(q, k, v, geometry, (SDPBackend.CUDNN_ATTENTION,))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, only: tuple[SDPBackend, ...]) -> Tensor:
    packing = geometry.packing
    with sdpa_kernel(list(only)) if only else nullcontext():
        if packing is None:
            return _sdpa_batch(q, k, v, geometry)
        lengths = [ends.diff().tolist() for ends in (packing.cu_seqlens_q, packing.cu_seqlens_k)]
        sequences = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        return torch.cat([_sdpa_batch(a[None], b[None], c[None], geometry)[0] for a, b, c in sequences])


def _sdpa_batch(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    # torch's own `is_causal` is level with the first key, ours with the last: the same where lengths are equal.
    is_plain_causal = geometry.is_causal and q.shape[1] == k.shape[1]
    mask = None if is_plain_causal else geometry.sees(q.shape[1], k.shape[1], q.device)
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_plain_causal,
        scale=geometry.softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


_FLEX_BLOCK = 128
"""Queries and keys in a block of FlexAttention's masks, by default."""


_FLEX_SHAPES, _MANY_FLEX_SHAPES = 64, 8
"""Shapes whose compiled FlexAttention is kept, and that after which a warning says that there are many."""


def _flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flex_attention(q, k, v, **options)


@functools.lru_cache(maxsize=_FLEX_SHAPES)
def _compiled_flex(*shape: object) -> Callable[..., Any]:
    """FlexAttention compiled for `shape` alone: whatever a new compilation follows from.

    torch counts compilations by code object. Past torch._dynamo.config.recompile_limit (8) it runs the function as it
    is, which holds all scores. So each shape has a code object of its own, and `fullgraph` makes torch raise
    FailOnRecompileLimitHit where one is compiled too often all the same (torch 2.11 and 2.13, convert_frame.py).
    """
    if _compiled_flex.cache_info().currsize == _MANY_FLEX_SHAPES:
        warnings.warn(
            f"backend flex: expected few shapes of q, k and v, got more than {_MANY_FLEX_SHAPES}; each is compiled, "
            "which takes seconds. Bring sequences to few lengths, or use the backend fa3, fa2 or cudnn.",
            stacklevel=2,
        )
    own = types.FunctionType(_flex.__code__.replace(), globals(), _flex.__name__)
    return torch.compile(own, dynamic=False, fullgraph=True)


def _is_compiled_here(q: Tensor) -> bool:
    """FlexAttention is a kernel only when it is compiled: here, unless by the caller, whose graph has it inside. On CPU
    it stays as it is, and holds all scores."""
    return q.is_cuda and not torch.compiler.is_compiling()


def flex_attention_(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """By torch's FlexAttention, compiled; its block mask is kept for the lengths seen last, of packed sequences made
    in each call."""
    packing = geometry.packing
    if packing is None:
        mask = _block_mask(q.shape[1], k.shape[1], geometry.left, geometry.right, q.device)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    else:
        mask = _packed_block_mask(len(q), len(k), geometry.left, geometry.right, packing)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    flex: Callable[..., Any] = _flex
    if _is_compiled_here(q):
        shapes = (q.shape, k.shape, v.shape)
        scale = geometry.softmax_scale
        flex = _compiled_flex(*shapes, q.dtype, q.device, geometry.left, geometry.right, scale, packing is not None)
    group = q.shape[-2] // k.shape[-2]
    out = flex(
        *heads_first,
        block_mask=mask,
        scale=geometry.softmax_scale,
        enable_gqa=group != 1,
        kernel_options=_kernel_options(heads_first[0].shape[-2] * group) if q.is_cuda else None,
    )
    return out.transpose(1, 2) if packing is None else out[0].transpose(0, 1)


def _kernel_options(rows: int) -> dict[str, Any]:
    """For few queries inductor picks a kernel that has all of a key head's queries, `rows`, in one block: with more
    than a block of the mask it finds no choice and raises (torch 2.11 and 2.13, create_flex_decoding_kernel)."""
    return {"BACKEND": "TRITON" if rows > _FLEX_BLOCK else "AUTO"}


def _sees(left: int, right: int, place_q: Tensor, place_k: Tensor) -> Tensor:
    offset = place_k - place_q
    seen = offset == offset
    if left != UNLIMITED:
        seen = seen & (offset >= -left)
    if right != UNLIMITED:
        seen = seen & (offset <= right)
    return seen


@functools.lru_cache(maxsize=16)
def _block_mask(num_q: int, num_k: int, left: int, right: int, device: torch.device) -> BlockMask | None:
    if left == UNLIMITED and right == UNLIMITED:
        return None

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _sees(left, right, i + num_k - num_q, j)

    return create_block_mask(sees, None, None, num_q, num_k, device=device)


def _places(num_tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(sequence, place counted back from its end) of each token."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(tokens, cu_seqlens[1:].contiguous(), right=True)
    return sequence, tokens - cu_seqlens[1:][sequence]


def _packed_block_mask(num_q: int, num_k: int, left: int, right: int, packing: Packing) -> BlockMask:
    ends_q, ends_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    # Places counted from each sequence's end: the last query is level with the last key.
    sequence_q, place_q = _places(num_q, ends_q)
    sequence_k, place_k = _places(num_k, ends_k)

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (sequence_q[i] == sequence_k[j]) & _sees(left, right, place_q[i], place_k[j])

    return create_block_mask(sees, None, None, num_q, num_k, device=str(ends_q.device))


def fa2_attention(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """By the package flash-attn (FlashAttention-2)."""
    options: dict[str, Any] = {
        "softmax_scale": geometry.softmax_scale,
        "causal": geometry.right == 0,
        "window_size": (geometry.left, geometry.right),
    }
    flash_attn, packing = find_fa2(), geometry.packing
    if packing is None:
        out: Tensor = flash_attn.flash_attn_func(q, k, v, **options)
    else:
        out = flash_attn.flash_attn_varlen_func(q, k, v, *packing.flat(), **options)
    return out
