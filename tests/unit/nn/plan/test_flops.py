"""The rule that says which linears are large enough for FP8, held against what was measured on an H200."""

from __future__ import annotations

import math

import pytest

from fp8_ds.nn.plan.flops import MIN_NUMEL


@pytest.mark.parametrize(
    ("shape", "pays"),
    [
        ((4096, 4096), True),  # Llama-3-8B: q and o
        ((1024, 4096), True),  # k and v
        ((14336, 4096), True),
        ((2048, 2048), True),
        ((512, 3584), False),  # Qwen2.5-7B: k and v
        ((3072, 768), False),  # GPT-2
        ((768, 768), False),
    ],
)
def test_a_linear_pays_if_it_was_faster_at_8192_tokens(shape: tuple[int, int], pays: bool) -> None:
    assert (math.prod(shape) >= MIN_NUMEL) == pays
