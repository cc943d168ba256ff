"""The 8-bit float formats that the package stores and multiplies; every number follows from bit counts.

A code is sign, exponent e, mantissa m. With bias b and M mantissa bits its value is
`2**(e - b) * (1 + m / 2**M)` for e > 0 and `2**(1 - b) * m / 2**M` for e = 0 (subnormal).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Float8Format:
    """Range and layout of one 8-bit float format.

    Args:
        name: lower-case name as in the configuration ("e4m3").
        dtype: torch dtype of that layout, or None where torch has none (the bytes are then uint8).
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        bias: subtracted from the exponent field.
        largest: the largest finite value.
        smallest_normal: smallest value with the full mantissa.
        smallest_subnormal: smallest value above zero.
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float

    @property
    def max(self) -> float:
        """Largest finite value; a saturating cast clamps to +-max. A number to torch.compile even with `dynamic=True`,
        by which floats of objects are symbols."""
        return self.largest if self.dtype is None else torch.finfo(self.dtype).max

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, where torch has one.

        Raises:
            ValueError: it has none.
        """
        if self.dtype is None:
            raise ValueError(f"format: expected one with a torch dtype, got {self.name}. Use E4M3 or E5M2.")
        return self.dtype


def _derive(
    name: str,
    dtype: torch.dtype | None,
    exponent_bits: int,
    mantissa_bits: int,
    reserved: Literal["top_exponent", "top_code", "none"],
) -> Float8Format:
    """`reserved`: which codes are not finite numbers (all of the top exponent, its last mantissa only, or none)."""
    bias = 2 ** (exponent_bits - 1) - 1
    top_exponent = 2**exponent_bits - 1
    top_mantissa = 2**mantissa_bits - 1
    if reserved == "top_exponent":
        top_exponent -= 1
    elif reserved == "top_code":
        top_mantissa -= 1
    return Float8Format(
        name=name,
        dtype=dtype,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        largest=2.0 ** (top_exponent - bias) * (1 + top_mantissa / 2**mantissa_bits),
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
    )


E4M3 = _derive("e4m3", torch.float8_e4m3fn, 4, 3, "top_code")
"""Signed, max 448, no infinity, NaN is the code with all bits set. Source: Micikevicius et al., "FP8 formats for deep
learning" (arXiv 2209.05433), table 1; OCP 8-bit floating point specification (OFP8) 1.0, table 1."""

E5M2 = _derive("e5m2", torch.float8_e5m2, 5, 2, "top_exponent")
"""Signed, max 57344, IEEE layout (the top exponent is infinity and NaN). Source: the same two tables."""

E4M4 = _derive("e4m4", None, 4, 4, "none")
"""Unsigned `eeeemmmm`, max 496, no infinity, no NaN; held as uint8. For square roots of second moments, which have no
sign. Source: DESIGN.md, "DeepSpeed" 6 (own format); the value follows from 2**(15 - 7) * (1 + 15/16)."""

BY_NAME = {fmt.name: fmt for fmt in (E4M3, E5M2, E4M4)}
