"""Formats: every derived number against torch, and against all 256 codes."""

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E4M4, E5M2


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_derived_numbers_agree_with_torch_finfo(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.smallest_normal == info.smallest_normal
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    assert fmt.smallest_subnormal == codes[codes > 0].min()
    assert fmt.max == codes[codes.isfinite()].max()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_next_value_above_max_is_not_finite(fmt):
    code = torch.tensor([fmt.max]).to(fmt.dtype).view(torch.uint8)
    assert not (code + 1).view(fmt.dtype).float().isfinite()


def test_e4m4_has_no_dtype_and_eight_unsigned_bits():
    assert E4M4.dtype is None
    assert E4M4.exponent_bits + E4M4.mantissa_bits == 8
    assert (E4M4.smallest_normal, E4M4.smallest_subnormal) == (2.0**-6, 2.0**-10)
