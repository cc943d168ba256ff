"""Reference of the sums and their gradients in plain torch, one choice of all tokens after another."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum(rows: Tensor, place: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return [T, C]."""
    output = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for j, own in enumerate(place.view(weights.shape).unbind(1)):
        output += weights[:, j, None].to(torch.float32) * rows[own].to(torch.float32)
    return output.to(out_dtype)


def weighted_sum_backward(grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([P, C], [T, k])."""
    grad = grad.to(torch.float32)
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    for j, own in enumerate(place.view(weights.shape).unbind(1)):
        grad_rows[own] = (weights[:, j, None].to(torch.float32) * grad).to(rows.dtype)
        grad_weights[:, j] = (grad * rows[own].to(torch.float32)).sum(1).to(weights.dtype)
    return grad_rows, grad_weights
