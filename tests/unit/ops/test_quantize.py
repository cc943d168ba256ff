"""Quantisation: rounding against an independent search over all codes, edges, and the recorded amax."""

import math

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import quantize, quantize_and_transpose_delayed, quantize_tensorwise, record_amax
from fp8_ds.ops.quantize.reference import amax
from fp8_ds.testing import assert_bitwise, sqnr_db

FORMATS = [E4M3, E5M2]
NAN, INF = float("nan"), float("inf")
ONE = torch.ones(())


def nearest_even(values, fmt):
    """Nearest code by search: all finite codes in order, ties to the even code. Knows nothing of torch's casts."""
    codes = torch.arange(128, dtype=torch.uint8)
    table = codes.view(fmt.dtype).double()
    codes = codes[table.isfinite()]
    table = table[table.isfinite()]
    distance = (values.double().abs()[:, None] - table[None, :]).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    even = nearest & (codes % 2 == 0)
    best = torch.where(nearest.sum(dim=1) > 1, even.int().argmax(dim=1), nearest.int().argmax(dim=1))
    return torch.where(values < 0, -table[best], table[best])


@pytest.mark.parametrize("fmt", FORMATS)
def test_cast_rounds_to_nearest_even_over_the_whole_range(fmt):
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    halfway = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, halfway, halfway * (1 + 2**-20), halfway * (1 - 2**-20), torch.randn(500) * fmt.max / 3])
    values = torch.cat([values, -values])
    got = quantize(values, ONE, fmt)
    assert got.dtype == fmt.dtype
    assert torch.equal(got.double(), nearest_even(values.clamp(-fmt.max, fmt.max), fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_beyond_the_range_saturate_and_nan_stays(fmt):
    x = torch.tensor([fmt.max * 1.01, 1e30, INF, -INF, -1e30, NAN, 0.0, -0.0])
    got = quantize(x, ONE, fmt).float()
    assert got[:5].tolist() == [fmt.max, fmt.max, fmt.max, -fmt.max, -fmt.max]
    assert got[5].isnan()
    assert got[6:].tolist() == [0.0, 0.0] and math.copysign(1, got[7].item()) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_happens_in_float32(dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = torch.tensor(97.3)
    expected = (x.double() * scale.double()).float().clamp(-448, 448)  # 8 + 24 bits are exact in float64
    assert_bitwise(quantize(x, scale, E4M3), quantize(expected, ONE, E4M3))


@pytest.mark.parametrize(("fmt", "bound"), [(E4M3, 31.0), (E5M2, 25.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensorwise_leaves_fp8_close_to_the_input(fmt, bound, dtype):
    # Uniform relative rounding error with M mantissa bits: about 6.02 M + 13.5 dB; measured 31.6 and 25.6.
    x = (torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 1e-4).to(dtype)
    x_fp8, scale_inv = quantize_tensorwise(x, fmt)
    assert scale_inv.shape == () and scale_inv.dtype == torch.float32
    assert x_fp8.float().abs().max() == fmt.max  # the whole range is used
    assert sqnr_db(x, x_fp8.float() * scale_inv) >= bound


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_single_non_finite_value_poisons_the_whole_tensor(bad):
    x = torch.randn(64)
    x[17] = bad
    x_fp8, scale_inv = quantize_tensorwise(x, E5M2)
    assert (x_fp8.float() * scale_inv).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amax_is_exact_and_sees_both_signs_and_nan(dtype):
    x = torch.randn(33, 7).to(dtype)
    x[3, 3] = -50.0
    assert amax(x) == 50.0 and amax(x).dtype == torch.float32 and amax(x).shape == ()
    assert amax(-x.t()) == 50.0
    x[0, 0] = NAN
    assert amax(x).isnan()
    assert amax(torch.tensor([-INF, 1.0]).to(dtype)) == INF


def test_empty_tensors_quantize_with_scale_one():
    for shape in ((0,), (0, 16), (16, 0)):
        x_fp8, scale_inv = quantize_tensorwise(torch.empty(shape), E4M3)
        assert x_fp8.shape == shape and x_fp8.dtype == E4M3.dtype and scale_inv == 1
    assert amax(torch.empty(0)) == 0


@pytest.mark.parametrize("record", [True, False])
def test_delayed_uses_the_given_scale_and_records_only_when_told(record):
    vector = torch.tensor([9.0, 0.25, 9.0])
    x = torch.tensor([[-0.5, 0.1, 500.0]])
    scale, scale_inv = torch.tensor(2.0), torch.tensor(0.5)
    x_fp8, _, got_inv = quantize_and_transpose_delayed(x, scale, scale_inv, vector[1], E4M3, "row", record=record)
    assert_bitwise(x_fp8, quantize(x, scale, E4M3))
    assert got_inv == 0.5 and got_inv.data_ptr() != scale_inv.data_ptr()
    assert vector.tolist() == [9.0, 500.0 if record else 0.25, 9.0]


def test_delayed_keeps_a_larger_recorded_amax():
    slot = torch.tensor(700.0)
    quantize_and_transpose_delayed(torch.ones(1, 3), ONE, ONE, slot, E4M3, "row", record=True)
    record_amax(torch.full((2,), 600.0), slot)
    assert slot == 700.0
    record_amax(torch.full((2,), -800.0), slot)
    assert slot == 800.0


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("record", [True, False])
def test_delayed_does_not_hide_a_non_finite_input(bad, record):
    slot = torch.tensor(1.0)
    x = torch.tensor([[1.0, bad]])
    x_fp8, _, scale_inv = quantize_and_transpose_delayed(x, ONE, ONE, slot, E4M3, "row", record=record)
    assert (x_fp8.float() * scale_inv).isnan().all()
    assert bool(slot.isfinite()) is not record


@pytest.mark.parametrize("x", [torch.randn(6, 4), torch.randn(4, 6).t().bfloat16(), torch.empty(0, 4)])
def test_ops_pass_opcheck(x):
    slot = torch.zeros(())
    ops = torch.ops.fp8_ds
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.quantize.default, (x, ONE, E4M3.dtype, E4M3.max), test_utils=checks)
    for current in (ops.quantize_tensorwise, ops.quantize_tensor_pow2):
        torch.library.opcheck(current.default, (x, E5M2.dtype, E5M2.max), test_utils=checks)
    torch.library.opcheck(ops.record_amax.default, (x, slot), test_utils=checks)
    part = (x.flatten().contiguous(), torch.rand(3, 2) + 0.5, 2, 4, 3, 2, E4M3.dtype, E4M3.max)
    torch.library.opcheck(ops.quantize_part.default, part, test_utils=checks)
