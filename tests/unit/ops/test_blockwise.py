"""Blockwise quantisation: scales against a search, layouts, edges, the transpose of codes, amaxes of shards."""

import itertools
import math

import pytest
import torch
from support import MANY_SCALES, many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import (
    BLOCK,
    dequantize_groupwise,
    num_blocks,
    quantize_blockwise,
    quantize_groupwise,
    transpose_blockwise,
)
from fp8_ds.ops.quantize import quantize
from fp8_ds.testing import assert_bitwise, sqnr_db

FORMATS = [E4M3, E5M2]
ROWS, SQUARES = (1, 128), (128, 128)
NAN, INF = float("nan"), float("inf")


def dequantize(x_fp8, scale_inv, block):
    rows = scale_inv.repeat_interleave(block[0], 0)
    return x_fp8.float() * rows.repeat_interleave(128, 1)[: x_fp8.shape[0], : x_fp8.shape[1]]


def largest_power_of_two(amax, fp8_max):
    """By search, in exact arithmetic of Python's floats."""
    return max(2.0**e for e in range(-140, 127) if amax * 2.0**e <= fp8_max)


@pytest.mark.parametrize("fmt", FORMATS)
def test_scale_is_the_largest_power_of_two_that_does_not_overflow(fmt):
    powers = [2.0**e for e in (-149, -130, -126, -118, -111, -20, 0, 1, 7, 8, 9, 15, 16, 100, 127)]
    amaxes = [power * factor for power in powers for factor in (1, 1.5, 1.75, math.nextafter(1.75, 2), 1.999)]
    x = torch.tensor(amaxes)[:, None].repeat(1, 128) * torch.tensor([-1.0] + [0.25] * 127)
    quantized = quantize_blockwise(x, fmt, ROWS, "row")
    measured = x[:, 0].abs().tolist()
    expected = torch.tensor([[largest_power_of_two(amax, fmt.max)] for amax in measured])
    assert_bitwise(quantized.scale_inv, expected.reciprocal())
    assert_bitwise(quantized.x_fp8, quantize(x, expected, fmt))


@pytest.mark.parametrize(("shape", "block"), itertools.product([(256, 384), (1, 1), (130, 257)], [ROWS, SQUARES]))
def test_every_block_is_quantized_as_if_it_were_alone(shape, block):
    x = many_scales("per_tile", *shape).bfloat16()
    quantized = quantize_blockwise(x, E4M3, block, "row")
    assert quantized.x_fp8.shape == shape and quantized.x_fp8.is_contiguous()
    grid = (-(-shape[0] // block[0]), num_blocks(shape[1]))
    assert quantized.scale_inv.shape == grid
    assert quantized.scale_inv.stride() == ((1, shape[0]) if block == ROWS else (grid[1], 1))  # as cuBLASLt reads them
    for i, j in itertools.product(*map(range, grid)):
        part = (slice(i * block[0], (i + 1) * block[0]), slice(j * 128, (j + 1) * 128))
        expected = 1 / largest_power_of_two(x[part].abs().max().item(), E4M3.max)
        assert quantized.scale_inv[i, j] == expected
        assert_bitwise(quantized.x_fp8[part], quantize(x[part], torch.tensor(1 / expected), E4M3))


@pytest.mark.parametrize(("block", "dtype"), [(ROWS, torch.bfloat16), (SQUARES, torch.float16), (ROWS, torch.float32)])
def test_col_is_the_row_of_the_transpose(block, dtype):
    x = many_scales("per_column", 130, 300).to(dtype)
    both, col = quantize_blockwise(x, E5M2, block, "both"), quantize_blockwise(x, E5M2, block, "col")
    row, of_transpose = quantize_blockwise(x, E5M2, block, "row"), quantize_blockwise(x.t(), E5M2, block, "row")
    assert row.x_fp8_t is row.scale_inv_t is col.x_fp8 is col.scale_inv is None
    for got, expected in zip(both, row[:2] + col[2:], strict=True):
        assert_bitwise(got, expected)
    assert_bitwise(both.x_fp8_t, of_transpose.x_fp8)
    assert_bitwise(both.scale_inv_t, of_transpose.scale_inv)
    if block == SQUARES:
        assert_bitwise(both.x_fp8_t, both.x_fp8.t())
        assert_bitwise(both.scale_inv_t, both.scale_inv.t())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("block", "bad"), [(ROWS, NAN), (ROWS, -INF), (SQUARES, INF), (SQUARES, NAN)])
def test_a_non_finite_value_poisons_its_block_and_no_other(bad, block, fmt):
    x = torch.ones(256, 256)
    x[130, 5] = bad
    quantized = quantize_blockwise(x, fmt, block, "both")
    for scale_inv, at in ((quantized.scale_inv, (130 // block[0], 0)), (quantized.scale_inv_t, (5 // block[0], 1))):
        assert scale_inv[at].isnan() and scale_inv.isnan().sum() == 1
    code = quantized.x_fp8[130, 5].float()
    assert code.isnan() if math.isnan(bad) else code == math.copysign(fmt.max, bad)
    if block == ROWS and fmt is E4M3:
        _, scale_inv_t = transpose_blockwise(quantized.x_fp8, quantized.scale_inv)
        assert scale_inv_t[:128, 1].isnan().all() and scale_inv_t.isnan().sum() == 128
        back = dequantize_groupwise(*quantize_groupwise(x.bfloat16()))
        assert back[130, :128].isnan().all() and back.isnan().sum() == 128 and back.nan_to_num(1).eq(1).all()


@pytest.mark.parametrize(("block", "fmt"), [(ROWS, E4M3), (SQUARES, E5M2)])
def test_extreme_blocks_come_back_finite_with_normal_scales(fmt, block):
    for value in (0.0, -0.0, 2.0**-149, 1e-39, -3e38):
        x = torch.full((3, 130), value)
        quantized = quantize_blockwise(x, fmt, block, "row")
        assert (quantized.scale_inv >= 2.0**-126).all() and (quantized.scale_inv.reciprocal() >= 2.0**-126).all()
        assert value != 0 or (quantized.scale_inv == 1).all()
        back = dequantize(quantized.x_fp8, quantized.scale_inv, block)
        torch.testing.assert_close(back, x, rtol=0.13, atol=2.0**-126 * fmt.smallest_subnormal)
        assert torch.equal(torch.signbit(back), torch.signbit(x))


def test_blocks_of_zeros_do_not_crush_their_tile():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 1e-4
    x[5] = 0
    row = quantize_blockwise(x, E4M3, ROWS, "row")
    x_fp8_t, scale_inv_t = transpose_blockwise(row.x_fp8, row.scale_inv)
    assert scale_inv_t.max() == row.scale_inv[torch.arange(128) != 5].max() < 1e-5
    assert sqnr_db(x, dequantize(x_fp8_t, scale_inv_t, ROWS).t()) > 30
    zeros = transpose_blockwise(torch.zeros(130, 4).to(E4M3.dtype), torch.ones(130, 1))
    assert not zeros[0].float().any() and (zeros[1] == 1).all()


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
@pytest.mark.parametrize("block", [ROWS, SQUARES])
def test_empty_matrices_have_empty_results(shape, block):
    quantized = quantize_blockwise(torch.empty(shape), E4M3, block, "both")
    assert quantized.x_fp8.shape == shape and quantized.x_fp8_t.shape == shape[::-1]
    assert quantized.scale_inv.shape == (-(-shape[0] // block[0]), num_blocks(shape[1]))
    if block == ROWS:
        x_fp8_t, scale_inv_t = transpose_blockwise(quantized.x_fp8, quantized.scale_inv)
        assert x_fp8_t.shape == shape[::-1] and scale_inv_t.shape == quantized.scale_inv_t.shape
    assert dequantize_groupwise(*quantize_groupwise(torch.empty(shape).bfloat16())).shape == shape


TRANSPOSE_DB = {
    "plain": (31.5, 31.5, 30.9, 30.9),
    "per_row": (31.9, 31.9, 25.2, 25.2),
    "per_column": (31.6, 31.6, 11.1, 30.8),
    "per_tile": (31.4, 31.4, 27.5, 27.5),
    "outlier_channel": (31.6, 31.6, 30.9, 30.9),
}
"""SQNR against x in dB, E4M3: from codes and from x, of the whole; from codes and from x, of the worst column."""


@pytest.mark.parametrize("family", TRANSPOSE_DB)
def test_transposed_codes_are_as_close_to_x_as_its_own_transpose_but_for_small_columns(family):
    plain = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    x = plain if family == "plain" else many_scales(family, 1024, 512)
    quantized = quantize_blockwise(x, E4M3, ROWS, "both")
    x_fp8_t, scale_inv_t = transpose_blockwise(quantized.x_fp8, quantized.scale_inv)
    from_codes = dequantize(x_fp8_t, scale_inv_t, ROWS)
    from_x = dequantize(quantized.x_fp8_t, quantized.scale_inv_t, ROWS)
    whole = [sqnr_db(x.t(), got) for got in (from_codes, from_x)]
    worst = [min(map(sqnr_db, x.t(), got)) for got in (from_codes, from_x)]
    assert whole + worst == pytest.approx(TRANSPOSE_DB[family], abs=0.1)


@pytest.mark.parametrize("family", MANY_SCALES)
def test_a_value_is_kept_within_a_sixteenth_and_at_31_db(family):
    """Half a step of E4M3 is 1/16 of a number at most, while it is normal: above 2**-13 of its group's amax."""
    x = many_scales(family, 200, 300).bfloat16()
    back = dequantize_groupwise(*quantize_groupwise(x))
    assert back.dtype == torch.bfloat16 and back.is_contiguous()
    assert sqnr_db(x, back) > 31
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    amax = groups.abs().amax(2).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    is_normal = x.float().abs() >= amax * 2.0**-13
    assert is_normal.float().mean() > 0.7
    error = (back.float() - x.float()).abs() / x.float().abs()
    assert (error[is_normal] <= 1 / 16).all()
