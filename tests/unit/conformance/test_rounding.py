"""What comparisons at FP8's rounding let pass, and what they still refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import rounding

ASSERT_CLOSE = rounding.forgiving_assert_close(torch.testing.assert_close, lambda line: None)
ALLCLOSE = rounding.forgiving_allclose(torch.allclose, lambda line: None)


def both_pass(actual: Tensor, expected: Tensor) -> bool:
    try:
        ASSERT_CLOSE(actual, expected)
        is_close = True
    except AssertionError:
        is_close = False
    assert ALLCLOSE(actual, expected) == is_close
    return is_close


def gradient(dtype: torch.dtype) -> Tensor:
    """Normal values times a scale per row from 1e-6 to 1e3, as a gradient has them; shape (16, 32)."""
    scale = torch.logspace(-6, 3, 16)[:, None]
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2)], ids=str
)
def test_tensor_quantised_to_fp8_passes_though_it_fails_strictly(dtype: torch.dtype, fp8: torch.dtype) -> None:
    tensor = gradient(dtype)
    scale = torch.finfo(fp8).max / tensor.float().abs().max()
    quantized = ((tensor.float() * scale).to(fp8).float() / scale).to(dtype)
    assert not torch.allclose(quantized, tensor, rtol=1.6e-2)
    assert both_pass(quantized, tensor) and both_pass(tensor, quantized)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "wrong sign": torch.neg,
    "zeroed half": lambda tensor: tensor * torch.tensor([0.0, 1.0]).repeat(16).to(tensor.dtype),
    "factor 2": lambda tensor: 2 * tensor,
    "NaN": lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("nan")),
    "inf": lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("inf")),
    "zeros": torch.zeros_like,
    "shuffled": lambda tensor: tensor.roll(1, dims=1),
    "three quantisation steps": lambda tensor: tensor * 1.2,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensor_fails(name: str) -> None:
    right = gradient(torch.float32)
    assert not both_pass(WRONG[name](right), right) and not both_pass(right, WRONG[name](right))
