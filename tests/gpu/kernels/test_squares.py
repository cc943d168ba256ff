"""The sum of squares of many tensors by the kernel: its value, and its bits from call to call."""

import pytest
import torch
from support.kernels import DEVICE, KERNEL

from fp8_ds.ops.squares import BLOCK, SPAN, sum_of_squares

pytestmark = KERNEL


def exact(tensors):
    return sum(float(x.double().square().sum()) for x in tensors)


def test_tensors_of_any_size_and_alignment():
    torch.manual_seed(0)
    memory = torch.randn((SPAN + 2) * BLOCK).bfloat16().to(DEVICE)
    ends = [memory[:1], memory[1 : BLOCK + 1], memory[: 2 * BLOCK], memory[7 : BLOCK + 300], memory[: SPAN * BLOCK + 5]]
    tensors = [*ends, memory[3:], torch.randn(5).to(DEVICE)]
    launches = {}
    first = sum_of_squares(tensors, launches)
    assert float(first) == pytest.approx(exact(tensors), rel=1e-6)
    assert torch.equal(sum_of_squares(tensors, launches), first)
    for others in (tensors[:2], [memory[2:3], memory[3 : BLOCK + 3]]):
        assert float(sum_of_squares(others, launches)) == pytest.approx(exact(others), rel=1e-6)


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan"), 1e30])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK + 4, SPAN * BLOCK + 4])
def test_one_broken_element_is_never_hidden(broken, at):
    x = torch.zeros(max(at, BLOCK) + 5)
    x[at] = broken
    assert not torch.isfinite(sum_of_squares([torch.ones(3).to(DEVICE), x.to(DEVICE)], {}))
