"""Attention by FlashAttention-3, in FP8 or bf16, and the same in plain torch. docs/attention.md."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fp8_ds.attention.flash import flash_attention
from fp8_ds.attention.heads.reference import check_rotation
from fp8_ds.attention.packages import find_fa3, require_hopper
from fp8_ds.attention.shapes import Geometry, Packing, make_geometry
from fp8_ds.errors import UnsupportedError

__all__ = ["BACKENDS", "Backend", "Packing", "attention", "describe_backend", "require_backend"]

Backend = Literal["fa3", "fa3_fp8", "fa3_fp8_emulated", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_FA3: tuple[Backend, ...] = ("fa3", "fa3_fp8")
_FP8: tuple[Backend, ...] = ("fa3_fp8", "fa3_fp8_emulated")
_FA3_DTYPES = (torch.bfloat16, torch.float16)
_FA3_MAX_DIM, _FA3_FP8_ALIGNMENT, _FA3_ALIGNMENT = 256, 16, 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    packing: Packing | None = None,
    hadamard: bool = False,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `softmax(q k^T * softmax_scale + mask) v`, differentiably; the gradients are those of the backend.

    Args:
        q: bf16 or fp16 [batch, sequence, heads, dim], or packed [tokens, heads, dim]. The last dim is dense; the others
            may have any strides: Megatron's [sequence, batch, heads, dim] comes in as `q.transpose(0, 1)`,
            transformers' [batch, heads, sequence, dim] as `q.transpose(1, 2)`, without a copy. The emulated and
            reference backends take float32 and float64 too.
        k, v: the same, with a number of heads that divides q's (grouped queries) and a sequence of any length.
        backend: one of BACKENDS.
        causal: whether a query sees no key after it; the last query is aligned with the last key.
        window: (left, right), numbers of keys seen before and after a query, -1 for all; with causal, right is 0.
        softmax_scale: factor of the scores; None: dim ** -0.5.
        packing: bounds of packed sequences; the last one ends where the tokens end.
        hadamard: whether q and k are rotated before FP8; for fa3_fp8 and fa3_fp8_emulated, dim a power of two.
        dropout, bias: refused unless they have their defaults.

    Returns:
        Tensor of q's shape and dtype.

    Raises:
        UnsupportedError: a backend that is not installed or does not run on this device, with the command that
            installs it; arguments that it does not take. Nothing falls back to another backend.
    """
    _refuse(dropout, bias)
    geometry = make_geometry(q, k, v, causal=causal, window=window, softmax_scale=softmax_scale, packing=packing)
    is_tracing = torch.compiler.is_compiling()  # what is installed is no part of a graph; the op looks again
    if not is_tracing:
        require_backend(backend, q.device)
    if hadamard:
        if backend not in _FP8:
            raise UnsupportedError(
                f"hadamard: expected false with backend {backend}, got true. It is for what is rounded to FP8: use "
                "fa3_fp8."
            )
        check_rotation(q.shape[-1])
    is_fa3, fp8 = backend in _FA3, backend in _FP8
    if is_fa3 and not is_tracing:
        _check_fa3(q, geometry, fp8)
    return flash_attention(q, k, v, geometry, "fa3" if is_fa3 else "reference", fp8=fp8, hadamard=hadamard)


def require_backend(backend: Backend, device: torch.device) -> None:
    """Raise UnsupportedError, with the install command, if the backend is missing or cannot run on the device."""
    if backend not in BACKENDS:
        raise UnsupportedError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}. Use one of these, or call torch's "
            "scaled_dot_product_attention, its flex_attention or the package flash_attn yourself."
        )
    if backend in _FA3:
        require_hopper(device)
        fa3 = find_fa3()
        if backend == "fa3_fp8" and fa3.lacks("FP8"):
            raise UnsupportedError(
                f"backend fa3_fp8: expected a FlashAttention-3 built with FP8, got {fa3.describe()}. Build it without "
                "FLASH_ATTENTION_DISABLE_FP8, or use the backend fa3."
            )


def describe_backend(backend: Backend) -> str:
    """Describe what runs, for the line that rank 0 prints. `require_backend` must let the backend pass."""
    if backend in _FA3:
        kept = "E4M3 q, k, v kept, forward in FP8, backward in bf16; " if backend == "fa3_fp8" else ""
        return f"{backend} ({kept}{find_fa3().describe()})"
    return backend


def _refuse(dropout: float, bias: Tensor | None) -> None:
    shape = None if bias is None else tuple(bias.shape)
    for name, found, default in (("dropout", dropout, 0.0), ("bias", shape, None)):
        if found != default:
            raise UnsupportedError(
                f"{name}: expected {default}, got {found}. Attention here has none: turn it off, or keep the model's "
                "own attention (under Megatron, Transformer Engine's)."
            )


def _check_fa3(q: Tensor, geometry: Geometry, fp8: bool) -> None:
    """Refuse what the installed FlashAttention-3 does not take; its own error is a line of C++."""
    fa3 = find_fa3()
    head_dim, alignment = q.shape[-1], _FA3_FP8_ALIGNMENT if fp8 else _FA3_ALIGNMENT
    if q.dtype not in _FA3_DTYPES or (not fp8 and q.dtype == torch.float16 and fa3.lacks("FP16")):
        raise UnsupportedError(f"q: expected bfloat16 with {fa3.describe()}, got {q.dtype}. Train in bf16.")
    if head_dim % alignment or head_dim > _FA3_MAX_DIM:
        raise UnsupportedError(
            f"head dim: expected a multiple of {alignment} up to {_FA3_MAX_DIM}, got {head_dim}. Use the model's own "
            "attention."
        )
    if geometry.is_windowed and fa3.lacks("LOCAL"):
        raise UnsupportedError(
            f"window: expected none with {fa3.describe()}, got ({geometry.left}, {geometry.right}). Build "
            "FlashAttention-3 from source, or use the model's own attention."
        )
    if geometry.packing is not None and fa3.lacks("VARLEN"):
        raise UnsupportedError(
            f"packing: expected none with {fa3.describe()}, got packed sequences. Build FlashAttention-3 with VARLEN."
        )
