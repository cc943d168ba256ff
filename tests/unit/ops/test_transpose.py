"""The FP8 transpose on CPU, and its PTX run by hand; tests/gpu/kernels tests its kernel."""

import re

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.transpose import transpose
from fp8_ds.testing import assert_bitwise


@pytest.mark.parametrize("dtype", [E4M3.dtype, E5M2.dtype, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(16, 16), (1, 256), (256, 1), (13, 29), (0, 5), (5, 0)])
def test_every_byte_is_moved_to_its_place_whatever_it_means(shape, dtype):
    codes = torch.randperm(max(shape[0] * shape[1], 256), generator=torch.Generator().manual_seed(0)) % 256
    x = codes[: shape[0] * shape[1]].to(torch.uint8).reshape(shape)
    x_t = transpose(x.view(dtype))
    assert x_t.dtype == dtype and x_t.is_contiguous() and x_t.shape == shape[::-1]
    for i in range(shape[0]):
        assert_bitwise(x_t.view(torch.uint8)[:, i], x[i])


def test_byte_permutes_of_the_ptx_turn_a_block_of_4_by_4():
    """`prmt d, a, b, selector`: nibble i of the selector numbers a byte of a (0 to 3) or b (4 to 7) that goes to i."""
    pytest.importorskip("triton")
    from fp8_ds.ops.transpose.triton import TRANSPOSE_WORDS

    block = [[f"{row}{col}" for col in range(4)] for row in range(4)]
    registers = {f"${4 + row}": block[row] for row in range(4)}
    lines = re.findall(r"prmt\.b32 (\S+), (\S+), (\S+), 0x(\w{4});", TRANSPOSE_WORDS)
    assert len(lines) == TRANSPOSE_WORDS.count("prmt") == 8
    for target, a, b, selector in lines:
        pool = registers[a] + registers[b]
        registers[target] = [pool[int(nibble)] for nibble in reversed(selector)]
    assert [registers[f"${col}"] for col in range(4)] == [list(column) for column in zip(*block, strict=True)]
