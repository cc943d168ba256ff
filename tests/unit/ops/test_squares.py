"""The sum of squares of many tensors; tests/gpu/kernels has the kernel."""

import pytest
import torch

from fp8_ds.ops.squares import SumOfSquares


def test_sum_on_cpu():
    torch.manual_seed(0)
    tensors = [torch.randn(5, 7).bfloat16(), torch.randn(300)]
    expected = sum(float(x.double().square().sum()) for x in tensors)
    assert float(SumOfSquares()(tensors)) == pytest.approx(expected, rel=1e-6)
    assert SumOfSquares()([torch.tensor([float("inf")])]).isinf()
