"""Attention in plain torch, one head at a time: the reference of the kernels, and FlashAttention-3's FP8 on CPU.

Numerics are those of the flash kernels: scores and sums in float32 (float64 for float64), probabilities and the
gradients of scores rounded to the dtype of q before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8_ds.attention.shapes import Geometry
from fp8_ds.numerics.formats import E4M3

P_SCALE = 256.0
"""Factor of probabilities in FlashAttention-3 before they become E4M3, to use more of its range. Source:
Dao-AILab/flash-attention hopper/softmax.h (`max_offset` 8) and flash_fwd_kernel_sm90.h, read 2026-11-21."""


def _sequences(geometry: Geometry, batch: int) -> Iterator[tuple[int, slice | int, slice | int]]:
    """Yield (sequence, its place in q, its place in k)."""
    packing = geometry.packing
    if packing is None:
        yield from ((i, i, i) for i in range(batch))
        return
    ends_q, ends_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        yield i, slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])


def lse_shape(q: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Return [batch, heads, sequence], or [heads, tokens] of packed sequences: the flash kernels' layout."""
    if geometry.packing is None:
        return q.shape[0], q.shape[2], q.shape[1]
    return q.shape[1], q.shape[0]


def _lse_at(lse: Tensor, at: slice | int, head: int) -> Tensor:
    return lse[at, head] if isinstance(at, int) else lse[head, at]


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, geometry: Geometry, descale: Tensor | None = None) -> Tensor:
    """Return the scores of one head, [m, n], minus infinity where nothing is seen."""
    scores = q @ k.t() * geometry.softmax_scale
    if descale is not None:
        scores = scores * descale
    seen = geometry.sees(scores.shape[0], scores.shape[1], scores.device)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, descales: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the output and the logarithm of each row's sum of exponentials.

    Args:
        q, k, v: as `attention` takes them, or all float8_e4m3fn.
        descales: float32 [3, sequences, kv heads] with FP8: multiply q, k, v by these to leave FP8. None else.
        geometry: who attends to whom.

    Returns:
        out: q's shape and dtype, bf16 for FP8. lse: float32 (float64 for float64), `lse_shape`; -infinity where a query
        sees nothing, and its output is 0.
    """
    is_fp8 = descales is not None
    work = _working(q.dtype)
    out = torch.empty(q.shape, dtype=torch.bfloat16 if is_fp8 else q.dtype, device=q.device)
    lse = torch.empty(lse_shape(q, geometry), dtype=work, device=q.device)
    group = q.shape[-2] // k.shape[-2]
    for i, at_q, at_k in _sequences(geometry, q.shape[0]):
        for head in range(q.shape[-2]):
            kv = head // group
            scale = None if descales is None else descales[0, i, kv] * descales[1, i, kv]
            scores = _scores(_head(q, at_q, head).to(work), _head(k, at_k, kv).to(work), geometry, scale)
            row_max = scores.amax(1, keepdim=True) if scores.shape[1] else scores.new_full((len(scores), 1), -torch.inf)
            row_max = torch.where(row_max == float("-inf"), torch.zeros_like(row_max), row_max)
            p = torch.exp(scores - row_max)
            total = p.sum(1, keepdim=True)
            if is_fp8:
                assert descales is not None
                p = (p * P_SCALE).to(E4M3.torch_dtype).to(work) * (descales[2, i, kv] / P_SCALE)
            else:
                p = p.to(q.dtype).to(work)
            rows = p @ _head(v, at_k, kv).to(work) / torch.where(total == 0, torch.ones_like(total), total)
            _head(out, at_q, head).copy_(rows)
            _lse_at(lse, at_q, head).copy_((row_max + total.log())[:, 0])
    return out, lse


def _head(x: Tensor, at: slice | int, head: int) -> Tensor:
    """Return a view [tokens, dim] of one sequence and head."""
    return x[at, :, head] if isinstance(at, int) else x[at, head]


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v from what the forward kept; probabilities are `exp(scores - lse)`.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), appendix B.4.
    """
    work = _working(q.dtype)
    grads = [torch.zeros(x.shape, dtype=work, device=x.device) for x in (q, k, v)]
    group = q.shape[-2] // k.shape[-2]
    for _, at_q, at_k in _sequences(geometry, q.shape[0]):
        for head in range(q.shape[-2]):
            kv = head // group
            mine = [_head(x, at, h).to(work) for x, at, h in ((q, at_q, head), (k, at_k, kv), (v, at_k, kv))]
            grad, result = _head(grad_out, at_q, head).to(work), _head(out, at_q, head).to(work)
            scores = _scores(mine[0], mine[1], geometry)
            row_lse = _lse_at(lse, at_q, head).to(work)[:, None]
            p = torch.where(row_lse == float("-inf"), torch.zeros_like(scores), torch.exp(scores - row_lse))
            grad_scores = p * (grad @ mine[2].t() - (grad * result).sum(1, keepdim=True))
            grad_scores = grad_scores.to(q.dtype).to(work) * geometry.softmax_scale
            _head(grads[0], at_q, head).add_(grad_scores @ mine[1])
            _head(grads[1], at_k, kv).add_(grad_scores.t() @ mine[0])
            _head(grads[2], at_k, kv).add_(p.to(q.dtype).to(work).t() @ grad)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
