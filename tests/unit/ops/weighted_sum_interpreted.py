"""The kernels of ops/weighted_sum in Triton's interpreter against references. test_interpreted.py runs this file.

Values are small whole numbers, and weights 1 and a half, so nothing is rounded: the interpreter truncates to bf16.
"""

import pytest
import torch

from fp8_ds.ops.weighted_sum import triton, weighted_sum_backward_reference, weighted_sum_reference
from fp8_ds.testing import assert_bitwise


@pytest.mark.parametrize(
    ("tokens", "choices", "features", "dtype", "weight_dtype"),
    [
        (5, 2, 48, torch.bfloat16, torch.float32),
        (3, 8, 33, torch.bfloat16, torch.bfloat16),
        (1, 1, 1, torch.float16, torch.float16),
        (4, 3, 2048, torch.float32, torch.float32),
    ],
)
def test_kernels_equal_the_references(tokens, choices, features, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 4, (tokens * choices, features), generator=generator).to(dtype)
    place = torch.randperm(tokens * choices, generator=generator)
    weights = (torch.randint(1, 3, (tokens, choices), generator=generator) / 2).to(weight_dtype)
    for out_dtype in (dtype, torch.float32):
        expected = weighted_sum_reference(rows, place, weights, out_dtype)
        assert_bitwise(expected, triton.weighted_sum(rows, place, weights, out_dtype))
    grad = torch.randint(-3, 2, (tokens, features), generator=generator).to(dtype)
    backwards = weighted_sum_backward_reference, triton.weighted_sum_backward
    expected, found = (backward(grad, rows, place, weights) for backward in backwards)
    for one, other in zip(expected, found, strict=True):
        assert_bitwise(one, other)
