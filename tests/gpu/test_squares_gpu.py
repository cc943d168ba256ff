"""The sum of squares on CUDA: its value, its bits from call to call, and that nobody waits."""

import pytest
import torch

from fp8_ds.ops.squares import SumOfSquares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SIZES = (1, 4096, 4096 * 1024, 300 * 7919, 16384)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_is_that_of_float64_and_repeatable(dtype):
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in SIZES]
    squares = SumOfSquares()
    got = squares(tensors)
    assert float(got) == pytest.approx(sum(float(x.double().square().sum()) for x in tensors), rel=1e-5)
    moved = [x.clone() for x in tensors]
    assert torch.equal(squares(moved), got)
    odd = torch.randn(4097, device="cuda").to(dtype)[1:]
    assert float(squares([odd])) == pytest.approx(float(odd.double().square().sum()), rel=1e-5)


def test_one_broken_element_is_found_and_nobody_waits():
    tensors = [torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in SIZES]
    squares = SumOfSquares()
    squares(tensors)
    tensors[3][-1] = float("nan")
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = squares(tensors)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert got.isnan()
