"""What comparisons at FP8's rounding let pass, and what they still refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import rounding

ERRORS: list[dict[str, Any]] = []
ASSERT_CLOSE = rounding.forgiving_assert_close(torch.testing.assert_close, ERRORS.append)
ALLCLOSE = rounding.forgiving_allclose(torch.allclose, ERRORS.append)


def passes_assert_close(actual: Any, expected: Any, **kwargs: Any) -> bool:
    try:
        ASSERT_CLOSE(actual, expected, **kwargs)
    except AssertionError:
        return False
    return True


BOTH = pytest.mark.parametrize("passes", [passes_assert_close, ALLCLOSE], ids=["assert_close", "allclose"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def gradient(dtype: torch.dtype) -> torch.Tensor:
    """Normal values times a scale per row from 1e-6 to 1e3, as a gradient has them; shape (16, 32)."""
    scale = torch.logspace(-6, 3, 16)[:, None]
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


def quantized(tensor: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(fp8).max / tensor.float().abs().max()
    return ((tensor.float() * scale).to(fp8).float() / scale).to(tensor.dtype)


@BOTH
@DTYPES
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_tensor_quantised_to_fp8_passes_though_it_fails_strictly(
    passes: Callable[..., bool], dtype: torch.dtype, fp8: torch.dtype
) -> None:
    tensor = gradient(dtype)
    assert not torch.allclose(quantized(tensor, fp8), tensor, rtol=1.6e-2)
    assert passes(quantized(tensor, fp8), tensor)
    assert passes(tensor, quantized(tensor, fp8))


def zero_half(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[:, ::2] = 0
    return tensor


def with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(0, torch.tensor([3]), value)

    return change


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wrong sign": torch.neg,
    "zeroed half": zero_half,
    "factor 2": lambda tensor: 2 * tensor,
    "half": lambda tensor: tensor / 2,
    "NaN": with_one(float("nan")),
    "inf": with_one(float("inf")),
    "zeros": torch.zeros_like,
    "shuffled": lambda tensor: tensor.roll(1, dims=1),
    "three quantisation steps": lambda tensor: tensor * 1.2,
}


@BOTH
@DTYPES
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("ours_first", [True, False])
def test_wrong_tensor_fails(
    passes: Callable[..., bool], dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor], ours_first: bool
) -> None:
    right = gradient(dtype)
    pair = (change(right), right) if ours_first else (right, change(right))
    assert not passes(*pair)
