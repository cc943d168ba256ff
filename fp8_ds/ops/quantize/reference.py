"""Quantisation in plain torch: slow and obvious; what kernels are held against, and what runs until they exist."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.scaling.current import scale_from_amax


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x`, float32, 0-dim; 0 for an empty tensor; NaN if there is a NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # aminmax reads x once and, unlike abs().max(), makes no copy of it; it propagates NaN.
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(torch.float32)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """`cast(clamp(x * scale))`, product in float32, cast to nearest even; NaN stays NaN, infinity saturates."""
    # The clamp comes first: past the range, casts of torch give NaN, infinity or the maximum, by version and device.
    return (x.to(torch.float32) * scale).clamp_(-fp8_max, fp8_max).to(dtype)


def quantize_tensorwise(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    scale, scale_inv = scale_from_amax(amax(x), fp8_max)
    return quantize(x, scale, dtype, fp8_max), scale_inv


def quantize_delayed(
    x: Tensor, scale: Tensor, scale_inv: Tensor, amax_local: Tensor, record: bool, dtype: torch.dtype, fp8_max: float
) -> tuple[Tensor, Tensor]:
    measured = amax(x)
    if record:
        record_amax(measured, amax_local)
    # A scale of the past saturates an infinity of today: the poison keeps it visible.
    poisoned = torch.where(torch.isfinite(measured), scale_inv, torch.full_like(scale_inv, float("nan")))
    return quantize(x, scale, dtype, fp8_max), poisoned


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    amax_local.copy_(torch.maximum(amax_local, amax(x)))
