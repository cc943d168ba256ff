"""Power-of-two scales for operands sent between ranks, which align them by exponent on arrival (ops/align)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA_BITS = 23  # of float32
_MANTISSA = (1 << MANTISSA_BITS) - 1


def exponent_rule(fp8_max: float) -> tuple[int, int]:
    """Return (carry, shift): with `carry` added to an amax's bits, the biased exponent less `shift` is scale_inv's."""
    mantissa, exponent = math.frexp(fp8_max)  # in [0.5, 1): one bit more than the stored fraction
    largest_fraction = int((2 * mantissa - 1) * (1 << MANTISSA_BITS))
    return _MANTISSA - largest_fraction, exponent - 1


def pow2_scale(amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return the largest power of two, at most 2**126, that takes each amax to `fp8_max` or below, and its inverse.

    An amax of 0 gives scale_inv 2**-126 and not 1, so that zeros never set the largest scale of a matrix. A non-finite
    amax gives scale_inv NaN, and the scale of an amax of 1.

    Returns:
        (scale, scale_inv): float32, the shape of amax (float32, >= 0); multiply to enter FP8, and to leave it.
    """
    carry, shift = exponent_rule(fp8_max)
    finite = amax.isfinite()
    bits = torch.where(finite, amax, 1.0).view(torch.int32)
    biased = (((bits + carry) >> MANTISSA_BITS) - shift).clamp(min=1)
    scale = ((254 - biased) << MANTISSA_BITS).view(torch.float32)
    scale_inv = (biased << MANTISSA_BITS).view(torch.float32)
    return scale, torch.where(finite, scale_inv, float("nan"))
