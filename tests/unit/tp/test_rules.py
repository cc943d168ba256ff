"""Power-of-two scales of operands that travel."""

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import pow2_scale
from fp8_ds.ops.blockwise.reference import scale_from_amax
from fp8_ds.testing import assert_bitwise

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
