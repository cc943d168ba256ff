"""Groups of 128 in E4M3 and back: exactness of the way back, error, edges; groupwise_interpreted.py runs the kernel."""

import pytest
import torch
from support import MANY_SCALES, many_scales

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.groupwise import GROUP, dequantize_groupwise, quantize_groupwise
from fp8_ds.testing import assert_bitwise, sqnr_db


@pytest.mark.parametrize("family", MANY_SCALES)
def test_a_value_is_kept_within_a_sixteenth_and_at_31_db(family):
    """Half a step of E4M3 is 1/16 of a number at most, while it is normal: above 2**-13 of its group's amax."""
    x = many_scales(family, 200, 300).bfloat16()
    back = dequantize_groupwise(*quantize_groupwise(x))
    assert back.dtype == torch.bfloat16 and back.is_contiguous()
    assert sqnr_db(x, back) > 31
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(2).repeat_interleave(GROUP, 1)[:, : x.shape[1]]
    is_normal = x.float().abs() >= amax * 2.0**-13
    assert is_normal.float().mean() > 0.7
    error = (back.float() - x.float()).abs() / x.float().abs()
    assert (error[is_normal] <= 1 / 16).all()


def test_what_is_kept_is_kept_exactly_the_second_time():
    """Nothing is lost on the way back."""
    once = dequantize_groupwise(*quantize_groupwise(many_scales("per_row", 64, 384).bfloat16()))
    assert_bitwise(once, dequantize_groupwise(*quantize_groupwise(once)))


def test_it_takes_a_byte_an_element_and_four_a_group():
    x_fp8, scale_inv = quantize_groupwise(torch.randn(64, 512).bfloat16())
    assert x_fp8.nbytes == 64 * 512 and scale_inv.nbytes == 4 * 64 * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_back_as_nan_in_its_group_alone(bad):
    x = torch.ones(3, 256).bfloat16()
    x[1, 200] = bad
    back = dequantize_groupwise(*quantize_groupwise(x))
    assert back[1, 128:].isnan().all()
    assert back[1, :128].eq(1).all() and back[::2].eq(1).all()


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)], ids=str)
def test_no_elements_are_no_work(shape):
    assert dequantize_groupwise(*quantize_groupwise(torch.empty(shape).bfloat16())).shape == shape


def test_wrong_arguments_are_refused():
    x_fp8, scale_inv = quantize_groupwise(torch.ones(4, 200))
    with pytest.raises(ValueError, match=r"x_fp8: expected float8_e4m3fn \[T, C\], contiguous, got torch.float32"):
        dequantize_groupwise(x_fp8.float(), scale_inv)
    with pytest.raises(ValueError, match=r"x_fp8: .* with strides"):
        dequantize_groupwise(x_fp8.t(), scale_inv)
    with pytest.raises(ValueError, match=r"scale_inv: expected float32 \(4, 2\), got torch.float32 \(4, 1\)"):
        dequantize_groupwise(x_fp8, scale_inv[:, :1])


def test_the_op_passes_opcheck():
    # test_schema compares inputs before and after by arithmetic that FP8 has not.
    arguments = quantize_groupwise(torch.randn(4, 200))
    torch.library.opcheck(torch.ops.fp8_ds.dequantize_groupwise.default, arguments, test_utils=("test_faketensor",))


def test_the_format_has_the_range_that_the_first_test_counts_on():
    assert E4M3.smallest_normal <= 224 * 2**-13
