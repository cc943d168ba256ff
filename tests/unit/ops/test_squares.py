"""The sum of squares of many tensors; its kernel in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from fp8_ds.ops.squares import SumOfSquares
from fp8_ds.testing.interpreted import run_interpreted

INTERPRETED = Path(__file__).with_name("squares_interpreted.py")


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


def test_sum_on_cpu():
    torch.manual_seed(0)
    tensors = [torch.randn(5, 7).bfloat16(), torch.randn(300)]
    expected = sum(float(x.double().square().sum()) for x in tensors)
    assert float(SumOfSquares()(tensors)) == pytest.approx(expected, rel=1e-6)
    assert SumOfSquares()([torch.tensor([float("inf")])]).isinf()
