"""The kernels of ops/weighted_sum against their references.

Values are small whole numbers, and weights 1 and a half, so nothing is rounded: the interpreter truncates to bf16, and
sums over features are made in another order.
"""

import pytest
import torch
from support.kernels import KERNEL, assert_all_same, to_device, with_cuda_sizes

from fp8_ds.ops.weighted_sum import triton, weighted_sum_backward_reference, weighted_sum_reference

pytestmark = KERNEL


@pytest.mark.parametrize(
    ("tokens", "choices", "features", "dtype", "weight_dtype"),
    with_cuda_sizes(
        [
            (5, 2, 48, torch.bfloat16, torch.float32),
            (3, 8, 33, torch.bfloat16, torch.bfloat16),
            (1, 1, 1, torch.float16, torch.float16),
            (4, 3, 2048, torch.float32, torch.float32),
        ],
        [(333, 2, 4096, torch.bfloat16, torch.float32), (65, 6, 2881, torch.float16, torch.float32)],
    ),
)
def test_kernels_equal_the_references(tokens, choices, features, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 4, (tokens * choices, features), generator=generator).to(dtype)
    place = torch.randperm(tokens * choices, generator=generator)
    weights = (torch.randint(1, 3, (tokens, choices), generator=generator) / 2).to(weight_dtype)
    grad = torch.randint(-3, 2, (tokens, features), generator=generator).to(dtype)
    arguments = rows, place, weights
    for out_dtype in (dtype, torch.float32):
        found = triton.weighted_sum(*to_device(*arguments), out_dtype)
        assert_all_same(weighted_sum_reference(*arguments, out_dtype), found)
    found = triton.weighted_sum_backward(*to_device(grad, *arguments))
    assert_all_same(weighted_sum_backward_reference(grad, *arguments), found)
