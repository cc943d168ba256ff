"""Rows of FP8 codes as columns with one scale; tests/gpu/kernels has the kernel."""

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.align import align
from fp8_ds.ops.quantize import quantize_tensor_pow2
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp.rules import quantize_rows_pow2

FORMATS = [E4M3, E5M2]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_aligned_rows_have_the_bytes_of_a_matrix_quantised_by_the_largest_scale(fmt):
    """But where a code is subnormal after the shift and has been rounded twice."""
    x = many_scales("per_row", 96, 64).bfloat16()
    codes, scale_inv = quantize_rows_pow2(x, fmt)
    columns, largest = align(codes, scale_inv[:, 0])
    whole, whole_scale_inv = quantize_tensor_pow2(x, fmt)
    assert_bitwise(largest, whole_scale_inv)
    whole_t = whole.t().contiguous()
    is_normal = whole_t.float().abs() >= fmt.smallest_normal
    assert is_normal.float().mean() > 0.8
    assert torch.equal(columns.float()[is_normal], whole_t.float()[is_normal])
    off = (columns.float() - whole_t.float()).abs()[~is_normal]
    assert not off.numel() or off.max() <= fmt.smallest_subnormal
    assert off.numel() or fmt is E5M2  # whose range holds all of it


def test_a_scale_for_each_rank_is_one_for_each_of_its_rows():
    x = torch.randn(48, 32)
    x[:16] *= 100
    codes, scale_inv = zip(*(quantize_tensor_pow2(part, E4M3) for part in x.chunk(3)), strict=True)
    whole, few = torch.cat([one.view(torch.uint8) for one in codes]).view(E4M3.dtype), torch.stack(scale_inv)
    for found, expected in zip(align(whole, few), align(whole, few.repeat_interleave(16)), strict=True):
        assert_bitwise(found, expected)


def test_rows_of_zeros_set_no_scale_and_zeros_alone_are_no_nan():
    x = torch.randn(8, 16) * 1e-20
    x[2:5] = 0
    codes, scale_inv = quantize_rows_pow2(x, E4M3)
    columns, largest = align(codes, scale_inv[:, 0])
    assert sqnr_db(x.t(), columns.float() * largest) > 25
    codes, scale_inv = quantize_rows_pow2(torch.zeros(8, 16), E4M3)
    columns, largest = align(codes, scale_inv[:, 0] * scale_inv[:, 0])  # as with the scales of another operand
    assert not columns.float().any() and largest.isfinite()


def test_one_row_that_is_not_finite_spoils_everything():
    x = torch.randn(8, 16)
    x[3, 3] = float("inf")
    columns, largest = align(*(part.squeeze(1) if part.shape[1] == 1 else part for part in quantize_rows_pow2(x, E4M3)))
    assert (columns.float() * largest).isnan().all()
