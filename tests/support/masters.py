"""Split masters of every magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.masters import MasterFormat

_MOST = 1 << 15


def every_master(fmt: MasterFormat) -> tuple[Tensor, Tensor]:
    """(hi, lo), as `numerics.masters.encode` gives them: all magnitudes of a format that has 32,768 at most, else as
    many that are spread over its range, with both signs; beside bf16 also high parts that somebody has set to zero."""
    step = max(1, fmt.max_mag // _MOST)
    mag = torch.cat([torch.arange(0, fmt.max_mag, step, dtype=torch.int64), torch.tensor([fmt.max_mag])])
    hi = (mag + (1 << (fmt.lo_bits - 1))) >> fmt.lo_bits
    lo = (mag - (hi << fmt.lo_bits)).to(fmt.lo_dtype)
    if fmt.is_fp8:
        return torch.cat([hi, hi | 0x80]).to(torch.uint8), torch.cat([lo, lo])
    codes = torch.cat([hi, hi | 0x8000, torch.zeros_like(hi)])
    return codes.to(torch.uint16).view(torch.bfloat16), torch.cat([lo, lo, lo])
