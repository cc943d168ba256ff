"""The grouped products against their references.

Operands are small whole numbers but 0, whose sums may be -0, and scales powers of two: every sum is exact in whichever
order it is made.
"""

import pytest
import torch
from support.kernels import INTERPRETED, KERNEL, assert_all_same, to_device, with_cuda_sizes

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.grouped import can_run, reference, triton
from fp8_ds.ops.grouped.reference import num_columns
from fp8_ds.testing import assert_bitwise

pytestmark = [
    *KERNEL,
    pytest.mark.skipif(
        not INTERPRETED and not can_run(torch.device("cuda")), reason="needs compute capability 9, 10 or 11"
    ),
]

SMALL = triton.Tiles(rows=32, cols=16, inner=32, tall=2, flatten=False)
TILES = [SMALL] if INTERPRETED else []
"""On CUDA those that `triton` chooses."""
FORMATS = [(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.float16), (E4M3, E5M2, torch.float32)]
SIZES = {
    "nothing": [0, 0, 0],
    "one": [1],
    "ragged": [37, 0, 64, 1, 0, 130],
    "first_and_last_empty": [0, 5, 0],
    "whole_tiles": [32, 128, 64],
} | ({} if INTERPRETED else {"many": [3, 300, 0, 64, 17] * 26, "long": [37, 0, 640, 1, 0, 130, 128, 127, 129]})
WIDTHS = with_cuda_sizes([(48, 80)], [(512, 256), (16, 16), (1536, 2048)])
"""N and K"""
SCALES = (torch.tensor(0.5), torch.tensor(2.0**-7))


def whole(shape, fmt, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(4, shape, generator=generator)].to(fmt.dtype)


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("num_behind", [0, 45])
@pytest.mark.parametrize(("num_out", "num_in"), WIDTHS)
@pytest.mark.parametrize("fast", with_cuda_sizes([False], [True]))
def test_rows_by_matrices_equal_the_reference_bitwise(sizes, num_behind, num_out, num_in, fast):
    num_rows = sum(sizes) + num_behind
    a, b = whole((num_rows, num_in), E5M2, 0), whole((len(sizes), num_out, num_in), E4M3, 1)
    arguments = (a, b, ends_of(sizes), *SCALES, torch.bfloat16)
    found = triton.rows_by_matrices(*to_device(*arguments), fast, *TILES)
    assert_all_same(reference.rows_by_matrices(*arguments), found)
    assert not found[sum(sizes) :].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("num_behind", [0, 45])
def test_columns_equal_the_reference_bitwise(sizes, num_behind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (sum(sizes) + num_behind, 80), generator=generator).to(torch.uint8)
    expected, found = reference.columns(x, ends_of(sizes)), triton.columns(*to_device(x, ends_of(sizes)))
    assert expected.shape == found.shape == (80, num_columns(len(x), len(sizes)))
    written = sum(-(-size // 128) * 128 for size in sizes)
    assert_bitwise(expected[:, :written], found[:, :written].cpu())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("num_out", "num_in"), WIDTHS)
@pytest.mark.parametrize("fast", with_cuda_sizes([False], [True]))
def test_columns_by_columns_equal_the_reference_bitwise(sizes, num_out, num_in, fast):
    grad, x = whole((sum(sizes) + 7, num_out), E5M2, 0), whole((sum(sizes) + 7, num_in), E4M3, 1)
    ends = ends_of(sizes)
    arguments = (reference.columns(grad, ends), reference.columns(x, ends), ends, *SCALES, torch.bfloat16)
    expected = reference.columns_by_columns(*arguments)
    assert_all_same(expected, triton.columns_by_columns(*to_device(*arguments), fast, *TILES))
    start = 0
    for matrix, end in zip(expected, ends.tolist(), strict=True):
        rows = grad[start:end].float().t() @ x[start:end].float()
        assert_bitwise(matrix, (rows * 2.0**-8).bfloat16())
        start = end


@pytest.mark.parametrize(("a_fmt", "b_fmt", "dtype"), FORMATS)
@pytest.mark.parametrize(("programs", "halves", "fast"), [(0, 1, True), (1, 2, False)])
def test_formats_results_and_launches(a_fmt, b_fmt, dtype, programs, halves, fast):
    """One program a tile, or two for all of them: what a tile is does not depend on who takes it, nor on halves."""
    tiles = triton.Tiles(rows=32, cols=32, inner=64, tall=3, flatten=True, programs=programs, halves=halves)
    tiles = [tiles] if INTERPRETED else []
    a, b, ends = whole((100, 64), a_fmt, 0), whole((3, 64, 64), b_fmt, 1), ends_of([50, 0, 41])
    arguments = (a, b, ends, *SCALES, dtype)
    found = triton.rows_by_matrices(*to_device(*arguments), fast, *tiles)
    assert_all_same(reference.rows_by_matrices(*arguments), found)
    a_t, b_t = reference.columns(a, ends), reference.columns(b[0].repeat(2, 1)[:100].contiguous(), ends)
    arguments = (a_t, b_t, ends, *SCALES, dtype)
    found = triton.columns_by_columns(*to_device(*arguments), fast, *tiles)
    assert_all_same(reference.columns_by_columns(*arguments), found)


def test_a_group_does_not_see_its_neighbours_nans():
    a, b, ends = whole((40, 32), E5M2, 0), whole((2, 32, 32), E4M3, 1), ends_of([9, 20])
    a[:9] = a[29:] = float("nan")
    a, b, other, ends, *scales = to_device(a, b, whole((40, 32), E4M3, 2), ends, *SCALES)
    found = triton.rows_by_matrices(a, b, ends, *scales, torch.bfloat16, False, *TILES)
    assert found[:9].isnan().all() and not found[9:].isnan().any()
    a_t, b_t = triton.columns(a, ends), triton.columns(other, ends)
    found = triton.columns_by_columns(a_t, b_t, ends, *scales, torch.bfloat16, False, *TILES)
    assert found[0].isnan().all() and not found[1].isnan().any()
