"""Masters decoded in Triton's interpreter. test_interpreted.py runs this file in a child."""

import pytest
import torch
from support.masters import every_master

from fp8_ds.numerics.masters import BY_NAME, decode
from fp8_ds.ops.decode_master.triton import BLOCK, decode_master
from fp8_ds.testing import assert_bitwise

SPLIT = [fmt for fmt in BY_NAME.values() if fmt.is_split]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def test_kernel_equals_reference_bitwise(fmt, dtype):
    hi, lo = every_master(fmt)
    for scale_inv in [torch.tensor(2.0**exponent) for exponent in (-149, -140, -20, 0, 119)] if fmt.is_fp8 else [None]:
        out = torch.empty(hi.shape, dtype=dtype)
        decode_master(hi, lo, fmt, scale_inv, out)
        assert_bitwise(out, decode(hi, lo, fmt, scale_inv).to(dtype))


@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_nothing_behind_the_end_is_written(numel):
    fmt = BY_NAME["e4m11"]
    hi, lo = (x[:numel] for x in every_master(fmt))
    memory = torch.full((numel + 3,), 7.0)
    decode_master(hi, lo, fmt, torch.tensor(0.5), memory[1 : numel + 1])
    assert_bitwise(memory[1 : numel + 1], decode(hi, lo, fmt, torch.tensor(0.5)))
    assert memory[0] == 7 and memory[numel + 1 :].tolist() == [7, 7]
