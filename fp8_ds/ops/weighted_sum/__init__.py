"""Weighted sum of a token's expert outputs, each row read once, where eager code gathers, multiplies and sums.

Shape suffixes: T tokens, k rows of each, P = T k rows, C features. `place[t k + j]` is the row of token t's j-th
expert, and every row is some token's.

    output[t]          = sum_j weights[t, j] rows[place[t k + j]]
    grad_rows[place]   = weights[t, j] grad[t]
    grad_weights[t, j] = sum_C grad[t] rows[place]

All is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import register_pair


def weighted_sum_reference(rows: Tensor, place: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return [T, C]."""
    output = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for j, own in enumerate(place.view(weights.shape).unbind(1)):
        output += weights[:, j, None].to(torch.float32) * rows[own].to(torch.float32)
    return output.to(out_dtype)


def weighted_sum_backward_reference(
    grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ([P, C], [T, k])."""
    grad = grad.to(torch.float32)
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    for j, own in enumerate(place.view(weights.shape).unbind(1)):
        grad_rows[own] = (weights[:, j, None].to(torch.float32) * grad).to(rows.dtype)
        grad_weights[:, j] = (grad * rows[own].to(torch.float32)).sum(1).to(weights.dtype)
    return grad_rows, grad_weights


_sum = register_pair(
    "weighted_sum(Tensor rows, Tensor place, Tensor weights, ScalarType out_dtype) -> Tensor",
    weighted_sum_reference,
    lambda rows, place, weights, out_dtype: rows.new_empty((weights.shape[0], rows.shape[1]), dtype=out_dtype),
)
_backward = register_pair(
    "weighted_sum_backward(Tensor grad, Tensor rows, Tensor place, Tensor weights) -> (Tensor, Tensor)",
    weighted_sum_backward_reference,
    lambda grad, rows, place, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)


def _check(rows: Tensor, place: Tensor, weights: Tensor) -> None:
    is_whole = rows.dim() == weights.dim() == 2 and place.shape == (weights.numel(),) == (rows.shape[0],)
    if not is_whole or place.dtype != torch.int64:
        raise ValueError(
            f"rows, place, weights: expected [T k, C], int64 [T k] and [T, k], got {tuple(rows.shape)}, {place.dtype} "
            f"{tuple(place.shape)} and {tuple(weights.shape)}. Each row is one token's."
        )
    if not (rows.is_contiguous() and place.is_contiguous() and weights.is_contiguous()):
        raise ValueError(
            f"rows, place, weights: expected them contiguous, got strides {rows.stride()}, {place.stride()} and "
            f"{weights.stride()}. Call contiguous() first."
        )


def weighted_sum(rows: Tensor, place: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Sum each token's rows times their weights.

    Args:
        rows: bf16, fp16 or fp32, [P, C], contiguous.
        place: int64 [P], a permutation, on the same device.
        weights: bf16, fp16 or fp32, [T, k], contiguous.
        out_dtype: dtype of the result.

    Returns:
        `out_dtype` [T, C], contiguous.

    Raises:
        ValueError: shapes or layout other than these.
    """
    _check(rows, place, weights)
    return _sum(rows, place, weights, out_dtype)


def weighted_sum_backward(grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `weighted_sum`: (of rows, of weights), in their dtypes and shapes.

    Args:
        grad: [T, C], contiguous; the others are as in `weighted_sum`.

    Raises:
        ValueError: shapes or layout other than these.
    """
    _check(rows, place, weights)
    if grad.shape != (weights.shape[0], rows.shape[1]) or not grad.is_contiguous():
        raise ValueError(
            f"grad: expected [{weights.shape[0]}, {rows.shape[1]}], contiguous, got {tuple(grad.shape)} with strides "
            f"{grad.stride()}. It is the gradient of the sums."
        )
    return _backward(grad, rows, place, weights)
