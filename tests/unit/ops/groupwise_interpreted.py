"""The de-quantisation kernel in Triton's interpreter. test_interpreted.py runs this file in a child."""

import pytest
import torch
from support import many_scales
from support.producers import assert_same

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.groupwise import reference, triton

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of NaN


def assert_kernel_equals_reference(x_fp8, scale_inv):
    assert_same(
        reference.dequantize_groupwise(x_fp8, scale_inv), triton.dequantize_groupwise(x_fp8.contiguous(), scale_inv)
    )


@pytest.mark.parametrize("shape", [(32, 256), (1, 1), (33, 129), (5, 1000)], ids=str)
def test_shapes_equal_the_reference_bitwise(shape):
    codes = many_scales("per_tile", *shape).clamp(-448, 448).to(E4M3.dtype)
    scale_inv = torch.exp2(many_scales("per_row", shape[0], -(-shape[1] // 128)).clamp(-60, 60).round())
    assert_kernel_equals_reference(codes, scale_inv)
    assert_kernel_equals_reference(codes, scale_inv.t().contiguous().t())


def test_all_codes_by_all_scales_equal_the_reference_bitwise():
    """Also NaN as code and as scale, products that are subnormal in bf16, zero and infinite."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).repeat(64, 1)
    scale_inv = torch.exp2(torch.linspace(-126, 127, 63).round())
    scale_inv = torch.cat([scale_inv, torch.tensor([float("nan")])])[:, None].repeat(1, 2)
    assert_kernel_equals_reference(codes, scale_inv)
