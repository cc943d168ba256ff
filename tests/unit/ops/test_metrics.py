"""The yardsticks that the other tests trust."""

import math

import pytest
import torch

from fp8_ds.testing import assert_bitwise, sqnr_db


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_bitwise_sees_one_changed_element_zeros_and_dtypes_and_takes_nan_for_equal(dtype):
    a, nan = torch.ones(3, 4).to(dtype), torch.full((3,), float("nan")).to(dtype)
    b = a.clone()
    b.view(torch.uint8).reshape(-1)[-1] ^= 1
    assert_bitwise(a, a.clone())
    assert_bitwise(nan, nan.clone())
    for one, other in ((a, b), (0 * a.float(), -0.0 * a.float()), (a, a.to(torch.float16)), (a, a[None])):
        with pytest.raises(AssertionError):
            assert_bitwise(one, other)


def test_sqnr_of_a_one_percent_error_is_40_db():
    x = torch.randn(100)
    assert sqnr_db(x, x * 1.01) == pytest.approx(40.0, abs=1e-3) and sqnr_db(x, x) == math.inf
