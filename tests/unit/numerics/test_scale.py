"""amax -> scale."""

import math

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import row_scale_from_amax, scale_from_amax

TINY = 2.0**-149  # smallest subnormal of float32


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_amax_lands_on_fp8_max(fmt):
    amax = torch.rand(100).exp() * 37
    scale, scale_inv = scale_from_amax(amax, fmt.max)
    torch.testing.assert_close(amax * scale, torch.full_like(amax, fmt.max))
    torch.testing.assert_close(scale * scale_inv, torch.ones_like(scale))


def test_quotient_is_rounded_once():
    amax = torch.rand(10_000) + 0.1
    scale, _ = scale_from_amax(amax, E4M3.max)
    assert torch.equal(scale, (torch.tensor(E4M3.max, dtype=torch.float64) / amax.double()).float())


def test_zero_amax_gives_scale_one_and_that_of_a_row_the_largest_scale():
    scale, scale_inv = scale_from_amax(torch.zeros(()), E4M3.max)
    assert scale == 1 and scale_inv == 1
    amax = torch.tensor([0.0, TINY, 3.0, math.inf, math.nan])
    of_rows, plain = row_scale_from_amax(amax, E4M3.max), scale_from_amax(amax, E4M3.max)
    assert of_rows[0][0] == 2.0**126 and of_rows[1][0] == 2.0**-126 <= of_rows[1][:3].min()
    torch.testing.assert_close([one[1:] for one in of_rows], [one[1:] for one in plain], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("amax", [TINY, 2.0**-126, 1e-30, 3.4e38])
def test_extreme_amax_gives_finite_normal_scales(amax):
    scale, scale_inv = scale_from_amax(torch.tensor(amax), E5M2.max)
    for value in (scale, scale_inv):
        assert value.isfinite() and value >= torch.finfo(torch.float32).smallest_normal
    assert torch.tensor(amax) * scale <= E5M2.max * (1 + 1e-6)


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_non_finite_amax_poisons_scale_inv_only(amax):
    scale, scale_inv = scale_from_amax(torch.tensor(amax), E4M3.max)
    assert scale == 1
    assert scale_inv.isnan()


def test_bf16_amax_is_scaled_in_float32():
    scale, scale_inv = scale_from_amax(torch.tensor(3.0, dtype=torch.bfloat16), E4M3.max)
    assert scale.dtype == scale_inv.dtype == torch.float32
    assert scale == torch.tensor(448.0) / 3
