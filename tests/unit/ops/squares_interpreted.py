"""The sum of squares in Triton's interpreter. test_interpreted.py runs this file in a child."""

import pytest
import torch

from fp8_ds.ops.squares import BLOCK, SPAN, sum_of_squares

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of NaN


def exact(tensors):
    return sum(float(x.double().square().sum()) for x in tensors)


def test_tensors_of_any_size_and_alignment():
    torch.manual_seed(0)
    memory = torch.randn((SPAN + 2) * BLOCK).bfloat16()
    ends = [memory[:1], memory[1 : BLOCK + 1], memory[: 2 * BLOCK], memory[7 : BLOCK + 300], memory[: SPAN * BLOCK + 5]]
    tensors = [*ends, memory[3:], torch.randn(5)]
    launches = {}
    for _ in range(2):
        assert float(sum_of_squares(tensors, launches)) == pytest.approx(exact(tensors), rel=1e-6)
    assert set(launches) == {torch.bfloat16, torch.float32}
    tables = launches[torch.bfloat16]
    assert float(sum_of_squares(tensors[:2], launches)) == pytest.approx(exact(tensors[:2]), rel=1e-6)
    assert launches[torch.bfloat16] is not tables
    others = [memory[2:3], memory[3 : BLOCK + 3]]
    assert float(sum_of_squares(others, launches)) == pytest.approx(exact(others), rel=1e-6)


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan"), 1e30])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK + 4, SPAN * BLOCK + 4])
def test_one_broken_element_is_never_hidden(broken, at):
    x = torch.zeros(max(at, BLOCK) + 5)
    x[at] = broken
    assert not torch.isfinite(sum_of_squares([torch.ones(3), x], {}))
