"""Products in place on CPU, where their reference runs; multiply_interpreted.py runs the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_ds.ops.multiply import can_multiply, multiply_
from fp8_ds.testing import assert_bitwise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(300).to(dtype)
    for number in (1 / 3, 0.0, -2.0, float("inf")):
        expected, found = (x.double() * torch.tensor(number).double()).to(torch.float32).to(dtype), x.clone()
        multiply_(found, torch.tensor(number))
        assert_bitwise(expected, found)


def test_a_factor_of_one_leaves_the_bits_of_nans() -> None:
    x = torch.full((5,), 0x7F81, dtype=torch.int16).view(torch.bfloat16)
    multiply_(x, torch.ones(1, 1))
    assert (x.view(torch.int16) == 0x7F81).all()


def test_a_tensor_that_a_graph_has_saved_is_given_out() -> None:
    """Its version would be another after an operator of torch's, and autograd would refuse."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.ones_like(x))
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors
            multiply_(kept, grad)
            return kept

    x = torch.zeros(4, requires_grad=True)
    total = Kept.apply(x)
    for expected in (0.5, 0.25):  # the kept tensor is halved again, as Liger's is
        (grad,) = torch.autograd.grad(total, x, torch.tensor(0.5), retain_graph=True)
        assert grad.tolist() == [expected] * 4 and grad._version == 0


DENSE = {
    "a number": torch.zeros(()),
    "nothing": torch.zeros(0, 4),
    "a matrix": torch.zeros(3, 4),
    "its transpose": torch.zeros(3, 4).t(),
    "three dims in another order": torch.zeros(2, 3, 4).permute(1, 2, 0),
    "a row of a matrix": torch.zeros(3, 4)[1:2],
}
GAPS = {
    "columns": torch.zeros(3, 4)[:, :2],
    "every other row": torch.zeros(4, 4)[::2],
    "one row many times": torch.zeros(1, 4).expand(3, 4),
}


def test_any_tensor_without_gaps_is_taken() -> None:
    one = torch.ones(())
    assert {name for name, x in {**DENSE, **GAPS}.items() if can_multiply(x, one)} == set(DENSE)


@pytest.mark.parametrize(
    ("x", "factor"),
    [
        *((x, torch.ones(())) for x in GAPS.values()),
        (torch.zeros(3).double(), torch.ones(())),
        (torch.zeros(3), torch.ones(()).double()),
        (torch.zeros(3), torch.ones(2)),
        (torch.zeros(3), torch.ones((), device="meta")),
    ],
)
def test_others_are_refused(x: Tensor, factor: Tensor) -> None:
    with pytest.raises(ValueError, match="x, factor: expected bf16, fp16 or fp32 without gaps and one float32"):
        multiply_(x, factor)


def test_op_passes_opcheck() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fp8_ds.multiply.default, (torch.randn(20), torch.tensor(0.5)), test_utils=checks)
