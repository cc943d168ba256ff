"""Comparisons of tensors, in dB and bitwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr_db(ref: Tensor, x: Tensor) -> float:
    """Return the signal to noise ratio of `x` against `ref` in dB, `10 log10(sum ref^2 / sum (ref - x)^2)`.

    Args:
        ref: the exact values, any floating dtype and shape.
        x: the approximation, same shape; compared in float64.

    Returns:
        Infinity if equal; -infinity if `x` is not finite where `ref` is.
    """
    if ref.shape != x.shape:
        raise ValueError(f"x: expected shape {tuple(ref.shape)}, got {tuple(x.shape)}. Compare like with like.")
    signal = ref.detach().double()
    noise = (signal - x.detach().double()).square().sum().item()
    if not math.isfinite(noise):
        return -math.inf
    if noise == 0.0:
        return math.inf
    power = signal.square().sum().item()
    return 10.0 * math.log10(power / noise) if power > 0.0 else -math.inf


def assert_bitwise(a: Tensor, b: Tensor) -> None:
    """Fail unless dtype, shape and every byte agree (so -0 differs from +0, and NaN equals the same NaN)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"expected {a.dtype} {tuple(a.shape)}, got {b.dtype} {tuple(b.shape)}")
    if a.numel() == 0:
        return
    a_flat, b_flat = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    item_bytes = a.element_size()
    unequal = (a_flat.view(torch.uint8) != b_flat.view(torch.uint8)).reshape(-1, item_bytes).any(dim=1)
    num_unequal = int(unequal.sum())
    if num_unequal:
        first = int(unequal.nonzero()[0])
        raise AssertionError(
            f"{num_unequal} of {a.numel()} elements differ; first at flat index {first}: "
            f"{a_flat[first].item()!r} and {b_flat[first].item()!r}"
        )
