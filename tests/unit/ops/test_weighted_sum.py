"""Weighted sums of tokens' rows on CPU, where their reference runs; tests/gpu/kernels has the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops.weighted_sum import weighted_sum, weighted_sum_backward


def operands(tokens: int = 6, choices: int = 3, features: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens * choices, features, generator=generator)
    place = torch.randperm(tokens * choices, generator=generator)
    return rows, place, torch.rand(tokens, choices, generator=generator)


def test_sums_and_gradients_are_those_of_autograd() -> None:
    rows, place, weights = (one.double() if one.is_floating_point() else one for one in operands())
    rows.requires_grad_()
    weights.requires_grad_()
    expected = (rows[place].view(6, 3, 20) * weights.unsqueeze(-1)).sum(1)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    given = [one.detach().float() for one in (rows, weights)]
    torch.testing.assert_close(weighted_sum(given[0], place, given[1], torch.float32), expected.float())
    for one, found in zip((rows, weights), weighted_sum_backward(grad.float(), given[0], place, given[1]), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(found, one.grad.float())


def test_sums_of_bf16_are_rounded_once() -> None:
    """1 + 1/256 is halfway between two of bf16; three of it by a third are not 1."""
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]]).bfloat16()
    weights = torch.ones(1, 3).bfloat16()
    assert float(weighted_sum(rows, torch.arange(3), weights, torch.bfloat16)) == 1 + 2.0**-7
