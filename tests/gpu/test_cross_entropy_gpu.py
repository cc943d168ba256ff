"""liger-kernel's loss on CUDA with and without its patches: the same bits, larger chunks in tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_ds.engine.liger_loss import (
    calls_with_chunk_mem_const,
    keep_out_of_graphs,
    set_chunk_mem_const,
)
from fp8_ds.engine.patches import RECORD
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TOKENS, WIDTH, VOCABULARY = 2048, 512, 8192
"""16 chunks of 128 tokens, or, 4 times as large, 4 of 512."""


@pytest.fixture
def functional() -> Iterator[Any]:
    """liger-kernel's functions, with its patches undone after the test."""
    functional = pytest.importorskip("liger_kernel.transformers.functional", reason="liger-kernel is not installed")
    before = len(RECORD.patches)
    yield functional
    while len(RECORD.patches) > before:
        target, name, stock = RECORD.patches.pop()
        setattr(target, name, stock)


def operands() -> tuple[Tensor, torch.nn.Parameter, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", generator=generator).bfloat16() * 0.05
    target = torch.randint(VOCABULARY, (TOKENS,), device="cuda", generator=generator)
    target[::7] = -100
    return x, torch.nn.Parameter(weight), target


def loss_and_gradients(functional: Any, grad: float, weight: torch.nn.Parameter | None = None) -> list[Tensor]:
    """Loss, gradients of input and weight, and both of a second backward, which multiplies what the first has left."""
    x, own, target = operands()
    weight = own if weight is None else weight
    loss = functional.liger_fused_linear_cross_entropy(x, weight, target)
    found = [loss.detach()]
    for _ in range(2):
        grads = torch.autograd.grad(loss, (x, weight), torch.tensor(grad, device="cuda"), retain_graph=True)
        found += [one.clone() for one in grads]
    return found


@pytest.mark.parametrize("grad", [1.0, 0.5, 1 / 3])
def test_loss_and_gradients_have_ligers_bits(functional: Any, grad: float) -> None:
    expected = loss_and_gradients(functional, grad)
    assert torch.equal(expected[1], expected[3]) is (grad == 1)
    keep_out_of_graphs()
    for one, other in zip(expected, loss_and_gradients(functional, grad), strict=True):
        assert_bitwise(one, other)


def test_larger_chunks_give_the_loss_and_gradients_in_tolerance(functional: Any) -> None:
    """The weight's gradient is rounded to bf16 after each chunk: 4 times instead of 16."""
    if not calls_with_chunk_mem_const():
        pytest.skip("this liger-kernel takes no chunk_mem_const")
    keep_out_of_graphs()
    _, weight, _ = operands()
    one = loss_and_gradients(functional, 1.0)
    set_chunk_mem_const(weight, 4)
    four = loss_and_gradients(functional, 1.0, weight)
    assert float(one[0]) == pytest.approx(float(four[0]), rel=1e-4)
    assert sqnr_db(one[1], four[1]) > 40
    assert sqnr_db(one[2], four[2]) > 35
    assert not torch.equal(one[2], four[2])
