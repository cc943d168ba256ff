"""The kernel of ops/multiply in Triton's interpreter against its reference. test_interpreted.py runs this file.

Of bf16 the products are exact: the interpreter truncates to it.
"""

import pytest
import torch
from triton.runtime import interpreter

from fp8_ds.ops.multiply import BLOCK, multiply_by_kernel, multiply_reference
from fp8_ds.testing import assert_bitwise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of NaN

SIZES = [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK, 17 * BLOCK + 5]  # more blocks than the interpreter has programs
FACTORS = {torch.bfloat16: [0.5, -2.0, float("inf")], torch.float32: [1 / 3, 1 + 2.0**-23, float("nan")]}


@pytest.mark.parametrize("dtype", FACTORS)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_the_reference(size, dtype):
    memory = torch.randn(size + 3).to(dtype)
    memory[size // 2] = float("-inf")
    for number in [1.0, *FACTORS[dtype]]:
        factor = torch.tensor(number)
        expected, found = memory.clone(), memory.clone()
        multiply_reference(expected[1 : size + 1], factor)
        multiply_by_kernel(found[1 : size + 1], factor)  # what lies around it stays
        assert_bitwise(expected, found)


def test_a_transposed_matrix_and_a_factor_with_dims():
    x = torch.randn(130, 70).t()
    expected = x * 0.25
    multiply_by_kernel(x, torch.tensor([[0.25]]))
    assert_bitwise(expected, x)


def test_with_a_factor_of_one_nothing_is_written_and_only_the_factor_read(monkeypatch):
    loads = []
    builder = type(interpreter.interpreter_builder)
    load = builder.create_masked_load
    monkeypatch.setattr(builder, "create_masked_load", lambda *args: loads.append(1) or load(*args))
    monkeypatch.setattr(builder, "create_masked_store", lambda *args: pytest.fail("a store"))
    x = torch.full((3 * BLOCK,), 0x7F81, dtype=torch.int16).view(torch.bfloat16)  # NaNs that arithmetic would change
    multiply_by_kernel(x, torch.tensor(1.0))
    assert len(loads) == 3 and (x.view(torch.int16) == 0x7F81).all()
    with pytest.raises(pytest.fail.Exception):
        multiply_by_kernel(x, torch.tensor(0.5))
