"""Shapes of attention: who attends to whom, and where packed sequences begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_ds.errors import UnsupportedError

_NUM_SHOWN = 8
UNLIMITED = -1
"""A side of a window that has no end."""


@dataclass(frozen=True)
class Packing:
    """Packed sequences, one after another without padding.

    Args:
        cu_seqlens_q: int32 [n + 1], on the device of q: 0, and where each sequence of queries ends.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q: length of the longest sequence of queries; a larger number costs time, a smaller one is wrong.
        max_seqlen_k: the same for keys.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def flat(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the fields as arguments of an op. torch 2.11 does not trace `vars` of a dataclass."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int) -> Packing:
        """Build the packing of self-attention, in which queries and keys are of the same tokens."""
        return cls(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


@dataclass(frozen=True)
class Geometry:
    """Pattern of attention. Query i of m sees key j of n where `-left <= j - (i + n - m) <= right`.

    The last query is aligned with the last key, as in FlashAttention since 2.1; for m == n that is the plain diagonal.

    Args:
        softmax_scale: factor of the scores.
        left: number of keys seen before a query's own place, or UNLIMITED.
        right: number of keys seen after it, or UNLIMITED; 0 is causal.
        packing: None for [batch, sequence, heads, dim]; else tensors are [tokens, heads, dim].
    """

    softmax_scale: float
    left: int = UNLIMITED
    right: int = UNLIMITED
    packing: Packing | None = None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to its own place, which kernels call causal."""
        return self.left == UNLIMITED and self.right == 0

    @property
    def is_windowed(self) -> bool:
        return self.left != UNLIMITED or self.right > 0

    def sees(self, num_q: int, num_k: int, device: torch.device) -> Tensor | None:
        """Return a mask of one sequence, bool [num_q, num_k]; None where everything is seen."""
        if self.left == UNLIMITED and self.right == UNLIMITED:
            return None
        offset = torch.arange(num_k, device=device)[None, :] - torch.arange(num_q, device=device)[:, None]
        offset = offset - (num_k - num_q)
        seen = torch.ones_like(offset, dtype=torch.bool)
        if self.left != UNLIMITED:
            seen &= offset >= -self.left
        if self.right != UNLIMITED:
            seen &= offset <= self.right
        return seen


def make_geometry(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    softmax_scale: float | None,
    packing: Packing | None,
) -> Geometry:
    """Build the geometry, and check that the tensors fit it.

    Raises:
        UnsupportedError: shapes, dtypes or numbers other than `fp8_ds.attention.attention` takes.
    """
    dims = 4 if packing is None else 3
    layout = "[batch, sequence, heads, dim]" if packing is None else "[tokens, heads, dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims or x.dtype != q.dtype or not x.is_floating_point() or x.device != q.device:
            raise UnsupportedError(
                f"{name}: expected {layout}, floating, of q's dtype and device, got {x.dtype} {tuple(x.shape)} on "
                f"{x.device}. Pass `packing` with packed sequences, and only then."
            )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if k.shape != v.shape or k.shape[-1] != q.shape[-1] or (packing is None and k.shape[0] != q.shape[0]):
        raise UnsupportedError(
            f"k and v: expected one shape, with q's batch and head dim, got q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}. Leave heads whose values have another dim (MLA) to the model's own attention."
        )
    if kv_heads == 0 or heads % kv_heads:
        raise UnsupportedError(
            f"k: expected a number of heads that divides q's {heads}, got {kv_heads}. Each of k serves as many of q."
        )
    left, right = (UNLIMITED, UNLIMITED) if window is None else window
    if left < UNLIMITED or right < UNLIMITED:
        raise UnsupportedError(f"window: expected two numbers >= -1, got {window}. -1 is a side without an end.")
    if packing is not None:
        _check_packing(packing, len(q), len(k))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Geometry(scale, left, 0 if causal else right, packing)


def _check_packing(packing: Packing, num_q: int, num_k: int) -> None:
    for name, ends in (("cu_seqlens_q", packing.cu_seqlens_q), ("cu_seqlens_k", packing.cu_seqlens_k)):
        if ends.dtype != torch.int32 or ends.dim() != 1 or len(ends) != len(packing.cu_seqlens_q) or len(ends) < 2:
            raise UnsupportedError(
                f"packing.{name}: expected int32 [sequences + 1], got {ends.dtype} {tuple(ends.shape)}. "
                "Queries and keys have the same number of sequences."
            )
    _check_ends("cu_seqlens_q", packing.cu_seqlens_q, num_q)
    if packing.cu_seqlens_k is not packing.cu_seqlens_q or num_k != num_q:
        _check_ends("cu_seqlens_k", packing.cu_seqlens_k, num_k)


def _check_ends(name: str, ends: Tensor, num_tokens: int) -> None:
    """Refuse tokens of no sequence, whose outputs nobody would compute. On a GPU the device stops, as reading the
    numbers here would wait for it."""
    if ends.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(ends[-1] == num_tokens, f"packing.{name} must end at the number of tokens")
        return
    found = ends.tolist()
    if found[0] != 0 or found[-1] != num_tokens or found != sorted(found):
        shown = found if len(found) <= _NUM_SHOWN else f"[{found[0]}, {found[1]}, ..., {found[-1]}]"
        raise UnsupportedError(
            f"packing.{name}: expected numbers that rise from 0 to the number of tokens, {num_tokens}, got {shown}. "
            "Leave out tokens of no sequence, or make them a sequence of their own."
        )
