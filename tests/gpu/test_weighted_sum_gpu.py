"""Weighted sums of tokens' rows on CUDA against their reference: bitwise, but for the order of sums over features."""

from __future__ import annotations

import pytest
import torch

from fp8_ds.ops.weighted_sum import (
    weighted_sum,
    weighted_sum_backward,
    weighted_sum_backward_reference,
    weighted_sum_reference,
)
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize(
    ("tokens", "choices", "features", "dtype", "weight_dtype"),
    [
        (1000, 8, 2048, torch.bfloat16, torch.bfloat16),
        (333, 2, 4096, torch.bfloat16, torch.float32),
        (65, 6, 2881, torch.float16, torch.float32),
        (7, 1, 16384, torch.float32, torch.float32),
        (0, 2, 64, torch.bfloat16, torch.bfloat16),
    ],
)
def test_kernels_are_their_reference(
    tokens: int, choices: int, features: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(tokens * choices, features, device="cuda", generator=generator).to(dtype)
    place = torch.randperm(tokens * choices, device="cuda", generator=generator)
    weights = torch.rand(tokens, choices, device="cuda", generator=generator).to(weight_dtype)
    grad = torch.randn(tokens, features, device="cuda", generator=generator).to(dtype)
    for out_dtype in (dtype, torch.float32):
        expected = weighted_sum_reference(rows, place, weights, out_dtype)
        assert_bitwise(expected, weighted_sum(rows, place, weights, out_dtype))
    expected_rows, expected_weights = weighted_sum_backward_reference(grad, rows, place, weights)
    found_rows, found_weights = weighted_sum_backward(grad, rows, place, weights)
    assert_bitwise(expected_rows, found_rows)
    assert found_weights.dtype == weight_dtype and found_weights.shape == weights.shape
    if tokens:
        least = 50 if weight_dtype == torch.bfloat16 else 100
        assert float(sqnr_db(expected_weights.float(), found_weights.float())) > least
