"""Quantisation: rounding against a search over all codes, edges, amaxes, layouts, scales of rows and columns."""

import math

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import (
    quantize,
    quantize_and_transpose_delayed,
    quantize_and_transpose_measured,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_rowwise,
    quantize_tensorwise,
    record_amax,
)
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart
from fp8_ds.ops.quantize.reference import amax
from fp8_ds.testing import assert_bitwise

FORMATS = [E4M3, E5M2]
NAN, INF = float("nan"), float("inf")
ONE = torch.ones(())
SCALE = torch.tensor(2.5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amax_is_exact_and_sees_both_signs_and_nan(dtype):
    x = torch.randn(33, 7).to(dtype)
    x[3, 3] = -50.0
    assert amax(x) == 50.0 and amax(x).dtype == torch.float32 and amax(x).shape == ()
    assert amax(-x.t()) == 50.0
    x[0, 0] = NAN
    assert amax(x).isnan()
    assert amax(torch.tensor([-INF, 1.0]).to(dtype)) == INF and amax(torch.empty(0)) == 0


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_layouts_are_quantize_and_its_transpose_in_memory_of_their_own(bad):
    x = many_scales("outlier_channel", 9, 21)
    x[5, 6] = bad
    x_fp8, scale_inv = quantize_tensorwise(x, E5M2)
    row, col, found_scale_inv = quantize_and_transpose_tensorwise(x, E5M2, "both")
    assert row.is_contiguous() and col.is_contiguous() and row.data_ptr() != col.data_ptr()
    for got, expected in ((row, x_fp8), (col.t().contiguous(), x_fp8), (found_scale_inv, scale_inv)):
        assert_bitwise(got, expected)
    slot = torch.tensor(1.0)
    _, col, found_scale_inv = quantize_and_transpose_delayed(x, SCALE, 1 / SCALE, slot, E4M3, "col", record=True)
    assert_bitwise(col.t().contiguous(), quantize(x, SCALE, E4M3))
    *measured, amax = quantize_and_transpose_measured(x, SCALE, 1 / SCALE, E4M3, "col")
    assert measured[0] is None
    for a, b in zip((*measured[1:], amax), (col, found_scale_inv, slot), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("record", [True, False])
def test_delayed_uses_the_given_scale_records_only_when_told_and_hides_nothing(record):
    vector = torch.tensor([9.0, 0.25, 9.0])
    x = torch.tensor([[-0.5, 0.1, 500.0]])
    scale, scale_inv = torch.tensor(2.0), torch.tensor(0.5)

    def delayed(x):
        return quantize_and_transpose_delayed(x, scale, scale_inv, vector[1], E4M3, "row", record=record)

    x_fp8, _, got_inv = delayed(x)
    assert_bitwise(x_fp8, quantize(x, scale, E4M3))
    assert got_inv == 0.5 and got_inv.data_ptr() != scale_inv.data_ptr()
    delayed(x / 2)  # a larger one stays
    assert vector.tolist() == [9.0, 500.0 if record else 0.25, 9.0]
    record_amax(torch.full((2,), -800.0), vector[1])
    assert vector[1] == 800.0
    for bad in (NAN, INF):
        vector[1] = 1.0
        x_fp8, _, got_inv = delayed(torch.tensor([[1.0, bad]]))
        assert (x_fp8.float() * got_inv).isnan().all() and bool(vector[1].isfinite()) is not record


@pytest.mark.parametrize("fmt", FORMATS)
def test_rowwise_is_tensorwise_of_each_row_and_colwise_that_of_the_transpose(fmt):
    x, rows, cols = many_scales("per_tile", 21, 37).bfloat16(), torch.rand(21), torch.rand(37)
    x_fp8, scale_inv = quantize_rowwise(x, fmt)
    assert scale_inv.shape == (21, 1)
    for i in range(21):
        for whole, part in zip((x_fp8[i], scale_inv[i, 0]), quantize_tensorwise(x[i], fmt), strict=True):
            assert_bitwise(whole, part)
    cases = [(quantize_colwise_t(x, fmt), quantize_rowwise(x.t().contiguous(), fmt))]
    for view in (slice(None), (slice(None), None)):  # a factor is multiplied in float32, before amax and cast
        cases.append((quantize_rowwise(x, fmt, cols[view]), quantize_rowwise(x.float() * cols, fmt)))
        cases.append((quantize_colwise_t(x, fmt, rows[view]), quantize_colwise_t(x.float() * rows[:, None], fmt)))
    for got, expected in cases:
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])
        assert got[0].is_contiguous()


def test_rows_of_zeros_and_of_no_elements_have_the_smallest_scale_inv():
    zero = 2.0**-126
    x = torch.zeros(3, 4)
    x[1] = 448.0
    for quantized, scale_inv in (quantize_rowwise(x, E4M3), quantize_colwise_t(x.t().contiguous(), E4M3)):
        assert scale_inv.tolist() == [[zero], [1.0], [zero]]
        assert not quantized[::2].float().any()
    for shape in ((0, 4), (4, 0)):
        empty = torch.empty(shape)
        assert quantize_tensorwise(empty, E4M3)[1] == 1
        x_fp8, scale_inv = quantize_rowwise(empty, E4M3)
        x_fp8_t, scale_inv_t = quantize_colwise_t(empty, E4M3)
        assert x_fp8.shape == shape and scale_inv.tolist() == [[zero]] * shape[0]
        assert x_fp8_t.shape == shape[::-1] and scale_inv_t.tolist() == [[zero]] * shape[1]
        assert quantize_and_transpose_tensorwise(empty, E4M3, "both")[2] == 1


def test_a_cast_of_many_parts_finds_tensors_that_have_moved():
    """A kernel reads from the table where they are."""
    scales = torch.tensor(2.0), torch.tensor(3.0)
    parts = [QuantizePart(torch.randn(40), torch.zeros(40).to(E4M3.dtype), scale) for scale in scales]
    cast = MultiTensorQuantize(parts, E4M3)
    cast()
    parts[0].x.data = parts[0].x * -1.5
    cast()
    rows = torch.cat([launch.table for launch in cast._launches]).tolist()
    assert sorted(row[:3] for row in rows) == sorted(list(part.addresses) for part in parts)
    for part in parts:
        assert_bitwise(part.out, quantize(part.x, part.grid, E4M3))
