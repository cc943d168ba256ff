"""The sum of squares of many tensors; its kernel in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8_ds.ops.squares import SumOfSquares

INTERPRETED = Path(__file__).with_name("squares_interpreted.py")


def test_kernel_in_the_interpreter():
    """Triton decides at its import whether it interprets, and this process may have imported it."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [*command, str(INTERPRETED)], stdout=-1, stderr=-2, text=True, env=env, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_sum_on_cpu():
    torch.manual_seed(0)
    tensors = [torch.randn(5, 7).bfloat16(), torch.randn(300)]
    expected = sum(float(x.double().square().sum()) for x in tensors)
    assert float(SumOfSquares()(tensors)) == pytest.approx(expected, rel=1e-6)
    assert SumOfSquares()([torch.tensor([float("inf")])]).isinf()
