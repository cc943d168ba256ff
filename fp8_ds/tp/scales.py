"""Power-of-two scales for operands that travel: they can be aligned by exponent on arrival (ops/align)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops.blockwise import block_amax
from fp8_ds.ops.quantize import amax as tensor_amax
from fp8_ds.ops.quantize import quantize, quantize_part

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1


def pow2_scale(amax: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """The largest power of two, at most 2**126, that takes each amax to `fmt.max` or below, and its inverse.

    An amax of 0 gives scale_inv 2**-126 and not 1, so that zeros never set the largest scale of a matrix. A non-finite
    amax gives scale_inv NaN.

    Args:
        amax: float32, any shape, >= 0.
        fmt: E4M3 or E5M2.

    Returns:
        (scale, scale_inv): float32, the shape of amax.
    """
    mantissa, exponent = math.frexp(fmt.max)  # in [0.5, 1): one bit more than the stored fraction
    largest_fraction = int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))
    # Rounded up to the next exponent where the fraction is beyond that of fmt.max.
    biased = (amax.view(torch.int32) + (_MANTISSA - largest_fraction)) >> _MANTISSA_BITS
    biased = (biased - (exponent - 1)).clamp(min=1)
    scale = ((254 - biased) << _MANTISSA_BITS).view(torch.float32)
    scale_inv = (biased << _MANTISSA_BITS).view(torch.float32)
    return scale, scale_inv + amax * 0


def quantize_tensor_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by one power of two.

    Args:
        x: bf16, fp16 or fp32, contiguous [T, C].
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8 [T, C], scale_inv float32 0-dim).
    """
    scale, scale_inv = pow2_scale(tensor_amax(x), fmt)
    return quantize(x, scale, fmt), scale_inv


def quantize_rows_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by a power of two for each row: two reads of `x`.

    Args:
        x: bf16, fp16 or fp32, contiguous [T, C].
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8 [T, C], scale_inv float32 [T, 1]).
    """
    if x.numel() == 0:
        return x.to(fmt.torch_dtype), x.new_ones((x.shape[0], 1), dtype=torch.float32)
    amax = block_amax(x, (1, 128)).amax(1, keepdim=True)
    scale, scale_inv = pow2_scale(amax, fmt)
    x_fp8 = quantize_part(x.view(-1), scale, 0, x.shape[1], (1, x.shape[1]), fmt)
    return x_fp8.view(x.shape), scale_inv
