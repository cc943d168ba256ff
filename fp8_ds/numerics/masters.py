"""Master weights whose high part is the compute weight: FP8 byte + 16 or 8 bits, bf16 + 8 bits.

A float format stays monotone in its bits when mantissa bits are appended: E4M3 with r more bits is E4M(3+r), bf16 with
8 more is a 24-bit float. The master's magnitude bits are one integer `mag = hi * 2**r + lo` with `lo` signed, in
[-2**(r-1), 2**(r-1)): so `hi` is the master rounded to nearest (ties away from zero), which is the compute weight, and
the sign bit stays with `hi`. No second copy of the weight exists, and none is cast.

FP8 masters are scaled by a power of two: `w = value(mag) * scale_inv`. Another power of two moves exponents only,
exactly for normal numbers. `hi` must stay below 464 in FP8's units: above, `hi` would round to the NaN code.

Source: remainders beside bf16, NVIDIA/TransformerEngine PR 1408; an FP8 high part is ours (decision 0004).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT_SHIFT = 2.0**120
"""Moves a number with FP8's exponent field (bias 7) read as float32 (bias 127) to its value; exact, subnormals too."""


@dataclass(frozen=True)
class MasterFormat:
    """Storage format of a master weight.

    Args:
        name: as in the configuration; "bf16_8" is what parameters outside FP8 get beside any split FP8 master.
        lo_bits: bits below the compute weight; 0 where the master is a float32 tensor of its own.
        lo_dtype: dtype of the low part.
        hi_dtype: dtype of the high part: uint8 (E4M3 codes) or bf16.
        drop_bits: mantissa bits of float32 below the master's last bit.
        stochastic: whether rounding to it is: at lr 1e-5 an update is less than half a narrow format's last bit.
    """

    name: str
    lo_bits: int
    lo_dtype: torch.dtype
    hi_dtype: torch.dtype
    drop_bits: int
    stochastic: bool

    @property
    def is_split(self) -> bool:
        return self.lo_bits > 0

    @property
    def is_fp8(self) -> bool:
        return self.hi_dtype == torch.uint8

    @property
    def max_mag(self) -> int:
        """Largest magnitude whose high part is not NaN: just below 464 in FP8, just below infinity in bf16."""
        top = 0x7E if self.is_fp8 else 0x7F7F
        return (top << self.lo_bits) + (1 << (self.lo_bits - 1)) - 1


FP32 = MasterFormat("fp32", 0, torch.float32, torch.float32, 0, False)
E4M19 = MasterFormat("e4m19", 16, torch.int16, torch.uint8, 4, False)
E4M11 = MasterFormat("e4m11", 8, torch.int8, torch.uint8, 12, True)
BF16_8 = MasterFormat("bf16_8", 8, torch.int8, torch.bfloat16, 8, True)
BY_NAME = {fmt.name: fmt for fmt in (FP32, E4M19, E4M11, BF16_8)}


def encode(
    value: Tensor, fmt: MasterFormat, scale_inv: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split `value` into high and low part.

    Args:
        value: float32, any shape, finite.
        fmt: a split format.
        scale_inv: float32, 0-dim, a power of two; FP8 formats only.
        noise: int32 of value's shape, random in [0, 2**fmt.drop_bits): rounds stochastically. None: to nearest even.

    Returns:
        (hi, lo): `fmt.hi_dtype` and `fmt.lo_dtype`, value's shape. What exceeds the range saturates.
    """
    if fmt.is_fp8:
        assert scale_inv is not None
        value = (value * scale_inv.reciprocal()) * (1.0 / _EXPONENT_SHIFT)
    bits = value.contiguous().view(torch.int32)
    sign = bits < 0
    mag = bits & 0x7FFFFFFF
    if noise is None:
        noise = (1 << (fmt.drop_bits - 1)) - 1 + ((mag >> fmt.drop_bits) & 1)
    mag = ((mag + noise) >> fmt.drop_bits).clamp(max=fmt.max_mag)
    hi = (mag + (1 << (fmt.lo_bits - 1))) >> fmt.lo_bits
    lo = (mag - (hi << fmt.lo_bits)).to(fmt.lo_dtype)
    if fmt.is_fp8:
        return (hi | (sign.int() << 7)).to(torch.uint8), lo
    return (hi | (sign.int() << 15)).to(torch.int16).view(torch.bfloat16), lo


def decode(hi: Tensor, lo: Tensor, fmt: MasterFormat, scale_inv: Tensor | None = None) -> Tensor:
    """Return the master's value in float32, exact unless it underflows float32.

    Args:
        hi, lo: as `encode` gives them.
        scale_inv: float32, 0-dim, a power of two; FP8 formats only.
    """
    if fmt.is_fp8:
        code = hi.int()
        mag = ((code & 0x7F) << fmt.lo_bits) + lo.int()
        value = (mag << fmt.drop_bits).view(torch.float32) * _EXPONENT_SHIFT
        value = torch.where(code >= 0x80, -value, value)
        assert scale_inv is not None
        return value * scale_inv
    code = hi.view(torch.int16).int()
    mag = (((code & 0x7FFF) << fmt.lo_bits) + lo.int()).clamp(min=0)  # < 0: somebody has zeroed a bf16 parameter
    return ((mag << fmt.drop_bits) | (code & ~0x7FFFFFFF)).view(torch.float32)
