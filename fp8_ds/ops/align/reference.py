"""Reference of the shift in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops.transpose import reference


def align(x_fp8: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    if x_fp8.numel() == 0:
        return reference.transpose(x_fp8), scale_inv.new_ones(())
    ratio, largest = ratios(scale_inv)
    return shift_transpose(x_fp8, ratio), largest


def ratios(scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Return (each scale of [k] over the largest, the largest); the ratio is 0 where the largest is."""
    largest = scale_inv.amax()
    return torch.where(largest == 0, torch.zeros_like(scale_inv), scale_inv / largest), largest


def shift_transpose(x_fp8: Tensor, ratio: Tensor) -> Tensor:
    """Multiply codes [T, C] by `ratio`, float32 [k], a power of two for T / k rows each, to nearest even; transpose."""
    ratio = ratio.repeat_interleave(x_fp8.shape[0] // len(ratio))
    # FP8 codes and their products with powers of two are exact in bf16, as far down as an FP8 code can be told from 0.
    shifted = x_fp8.to(torch.bfloat16) * ratio.to(torch.bfloat16)[:, None]
    return reference.transpose(shifted.to(x_fp8.dtype))
