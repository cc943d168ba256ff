"""The 8-bit float formats that the package stores and multiplies; every number follows from bit counts.

A code is sign, exponent e, mantissa m. With bias b and M mantissa bits its value is
`2**(e - b) * (1 + m / 2**M)` for e > 0 and `2**(1 - b) * m / 2**M` for e = 0 (subnormal).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Float8Format:
    """Range and layout of one 8-bit float format, whose bias is `2**(exponent_bits - 1) - 1`.

    Args:
        name: lower-case name as in the configuration ("e4m3").
        dtype: torch dtype of that layout, or None where torch has none (the bytes are then uint8).
        exponent_bits, mantissa_bits: widths of the two fields.
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    mantissa_bits: int

    @property
    def max(self) -> float:
        """Largest finite value; a saturating cast clamps to +-max. torch.compile sees a number even with
        `dynamic=True`, by which floats of objects are symbols."""
        if self.dtype is not None:
            return torch.finfo(self.dtype).max
        return 2.0 ** (2 ** (self.exponent_bits - 1)) * (2 - 2.0**-self.mantissa_bits)  # no code is infinite or NaN

    @property
    def smallest_normal(self) -> float:
        """Smallest value with the full mantissa."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest value above zero."""
        return self.smallest_normal / 2**self.mantissa_bits

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the format.

        Raises:
            ValueError: torch has no such dtype.
        """
        if self.dtype is None:
            raise ValueError(f"format: expected one with a torch dtype, got {self.name}. Use E4M3 or E5M2.")
        return self.dtype


E4M3 = Float8Format("e4m3", torch.float8_e4m3fn, 4, 3)
"""Signed, max 448, no infinity, NaN is the code with all bits set. Source: Micikevicius et al., "FP8 formats for deep
learning" (arXiv 2209.05433), table 1; OCP 8-bit floating point specification (OFP8) 1.0, table 1."""

E5M2 = Float8Format("e5m2", torch.float8_e5m2, 5, 2)
"""Signed, max 57344, IEEE layout (the top exponent is infinity and NaN). Source: the same two tables."""

E4M4 = Float8Format("e4m4", None, 4, 4)
"""Unsigned `eeeemmmm`, max 496, no infinity, no NaN; held as uint8. For square roots of second moments, which have no
sign. Source: own format (docs/numerics.md); the largest value follows from 2**(15 - 7) * (1 + 15/16)."""

BY_NAME = {fmt.name: fmt for fmt in (E4M3, E5M2, E4M4)}
