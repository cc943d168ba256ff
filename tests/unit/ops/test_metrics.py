"""The yardsticks that the other tests trust."""

import math

import pytest
import torch

from fp8_ds.testing import assert_bitwise, sqnr_db


def test_sqnr_of_a_one_percent_error_is_40_db():
    x = torch.randn(100)
    assert sqnr_db(x, x * 1.01) == pytest.approx(40.0, abs=1e-3)
    assert sqnr_db(x, x) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_bitwise_sees_one_changed_element(dtype):
    a = torch.ones(3, 4).to(dtype)
    b = a.clone()
    assert_bitwise(a, b)
    b.view(torch.uint8).reshape(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match="1 of 12"):
        assert_bitwise(a, b)


def test_bitwise_tells_zeros_and_dtypes_apart_and_nan_equal():
    nan = torch.tensor([float("nan")])
    assert_bitwise(nan, nan.clone())
    for other in (torch.tensor([-0.0]), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, 1)):
        with pytest.raises(AssertionError):
            assert_bitwise(torch.zeros(1), other)
