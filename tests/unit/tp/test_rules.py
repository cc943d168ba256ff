"""Power-of-two scales of operands that travel."""

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import pow2_scale
from fp8_ds.ops.blockwise.reference import scale_from_amax
from fp8_ds.ops.quantize import quantize_tensor_pow2
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp.rules import quantize_rows_pow2

FORMATS = [E4M3, E5M2]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_scale_is_the_largest_power_of_two_that_does_not_saturate(fmt):
    amax = torch.exp2(30 * torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    edges = [fmt.max, fmt.max * (1 + 2**-20), fmt.max * (1 - 2**-20), 1.0, 2.0**-126, 1e-40, 3e38]
    amax = torch.cat([amax, torch.tensor(edges)])
    scale, scale_inv = pow2_scale(amax, fmt.max)
    expected = scale_from_amax(amax, fmt.max)  # the blockwise op's, by frexp
    assert_bitwise(scale, expected[0])
    assert_bitwise(scale_inv, expected[1])


def test_zeros_have_the_smallest_scale_and_what_is_not_finite_has_none():
    scale, scale_inv = pow2_scale(torch.tensor([0.0, float("inf"), float("nan")]), E4M3.max)
    assert scale_inv[0] == 2.0**-126 and scale[0] == 2.0**126
    assert scale_inv[1:].isnan().all() and scale[1:].equal(torch.full((2,), 256.0))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(48, 80), (3, 7), (1, 1), (0, 8)])
def test_codes_and_scales_leave_fp8_close_to_what_came(fmt, shape):
    x = many_scales("per_row", *shape).bfloat16() if shape[0] else torch.empty(shape, dtype=torch.bfloat16)
    for quantize in (quantize_tensor_pow2, quantize_rows_pow2):
        codes, scale_inv = quantize(x, fmt)
        assert codes.shape == shape and codes.dtype == fmt.dtype
        if shape[0] > 3:
            assert sqnr_db(x.float(), codes.float() * scale_inv) > (29 if fmt is E4M3 else 23)
    assert quantize_rows_pow2(x, fmt)[1].shape == (shape[0], 1)
