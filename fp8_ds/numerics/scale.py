"""The formula that turns an amax into a scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_SCALE = 2.0**126
"""Largest scale given: its reciprocal, 2**-126, is the smallest normal float32, so it survives flush-to-zero units."""


def scale_from_amax(amax: Tensor, fp8_max: float | Tensor) -> tuple[Tensor, Tensor]:
    """Map each amax onto `fp8_max`; elementwise, on the device, without a host synchronisation.

    An amax of 0 gives scale 1. A tiny amax gives at most 2**126, never infinity. A non-finite amax gives scale 1 and
    scale_inv NaN, so that whatever is de-quantised with it is NaN: a broken tensor is never hidden by saturation.

    Args:
        amax: largest magnitudes, >= 0, floating, any shape, any device.
        fp8_max: largest finite value of the target format; a number, or float32 on amax's device that broadcasts
            against amax.

    Returns:
        (scale, scale_inv): float32, the shape of amax; multiply by scale to enter FP8, by scale_inv to leave.
    """
    amax = amax.to(torch.float32)
    if not isinstance(fp8_max, Tensor):
        # Not `float / Tensor`: torch computes that as reciprocal times float, which rounds twice and overflows early.
        fp8_max = torch.full_like(amax, fp8_max)
    finite = torch.isfinite(amax)
    quotient = (fp8_max / amax).clamp(max=MAX_SCALE)
    scale = torch.where(finite & (amax > 0), quotient, torch.ones_like(amax))
    scale_inv = torch.where(finite, scale.reciprocal(), torch.full_like(amax, float("nan")))
    return scale, scale_inv


def row_scale_from_amax(amax: Tensor, fp8_max: float | Tensor) -> tuple[Tensor, Tensor]:
    """Map the amax of each row onto `fp8_max`, as `scale_from_amax`, but a row of zeros gets scale 2**126.

    Where a GEMM contracts over rows, their scale_inv is multiplied into the other operand before that is quantised. A
    scale_inv of 1 beside ones of 1e-6 would leave all but the element that meets the row of zeros without a digit.
    """
    amax = amax.to(torch.float32)
    scale, scale_inv = scale_from_amax(amax, fp8_max)
    is_zero = amax == 0
    return scale.masked_fill(is_zero, MAX_SCALE), scale_inv.masked_fill(is_zero, 1 / MAX_SCALE)


def scale_vector(num: int, device: torch.device | str) -> Tensor:
    """Ones, float32 [num], one every 16 bytes: cuBLASLt reads a scale through a pointer that must be so aligned.

    Source: a 0-dim view at another offset gives CUBLAS_STATUS_NOT_SUPPORTED (torch 2.11 + CUDA 13.0, H200).
    """
    return torch.ones(num, 4, dtype=torch.float32, device=device)[:, 0]


@dataclass(frozen=True)
class AmaxSlot:
    """One tensor's entries of an AmaxHistory: 0-dim float32 tensors in its memory, each the whole of its own storage.

    With a shared version counter, one linear recording its amax would invalidate what another has kept for backward.
    With a shared storage, torch.compile takes two amaxes that one op writes for overlapping tensors.
    From `origin`, the history and the index in it, copies and pickles take their views: plain pickle cuts them off.
    """

    amax_local: Tensor
    scale: Tensor
    scale_inv: Tensor
    origin: tuple[Any, int] | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.origin is None else (type(self.origin[0]).slot, self.origin)
