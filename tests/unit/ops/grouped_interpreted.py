"""The grouped products in Triton's interpreter against their references. test_interpreted.py runs this file.

Operands are small whole numbers but 0, whose sums may be -0, and scales powers of two: every sum is exact in whichever
order it is made.
"""

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.grouped import reference, triton
from fp8_ds.ops.grouped.reference import num_columns
from fp8_ds.testing import assert_bitwise

SMALL = triton.Tiles(rows=32, cols=16, inner=32, tall=2, flatten=False)
CASES = [(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.float16), (E4M3, E5M2, torch.float32)]
SIZES = {
    "nothing": [0, 0, 0],
    "one": [1],
    "ragged": [37, 0, 64, 1, 0, 130],
    "first_and_last_empty": [0, 5, 0],
    "whole_tiles": [32, 128, 64],
}
SCALES = (torch.tensor(0.5), torch.tensor(2.0**-7))


def whole(shape, fmt, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(4, shape, generator=generator)].to(fmt.dtype)


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("num_behind", [0, 45])
def test_rows_by_matrices_equal_the_reference_bitwise(sizes, num_behind):
    num_rows = sum(sizes) + num_behind
    a, b = whole((num_rows, 80), E5M2, 0), whole((len(sizes), 48, 80), E4M3, 1)
    arguments = (a, b, ends_of(sizes), *SCALES, torch.bfloat16)
    found = triton.rows_by_matrices(*arguments, False, SMALL)
    assert_bitwise(reference.rows_by_matrices(*arguments), found)
    assert not found[sum(sizes) :].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("num_behind", [0, 45])
def test_columns_equal_the_reference_bitwise(sizes, num_behind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (sum(sizes) + num_behind, 80), generator=generator).to(torch.uint8)
    expected, found = reference.columns(x, ends_of(sizes)), triton.columns(x, ends_of(sizes))
    assert expected.shape == found.shape == (80, num_columns(len(x), len(sizes)))
    written = sum(-(-size // 128) * 128 for size in sizes)
    assert_bitwise(expected[:, :written], found[:, :written])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_columns_by_columns_equal_the_reference_bitwise(sizes):
    grad, x = whole((sum(sizes) + 7, 48), E5M2, 0), whole((sum(sizes) + 7, 80), E4M3, 1)
    ends = ends_of(sizes)
    arguments = (reference.columns(grad, ends), reference.columns(x, ends), ends, *SCALES, torch.bfloat16)
    expected = reference.columns_by_columns(*arguments)
    assert_bitwise(expected, triton.columns_by_columns(*arguments, False, SMALL))
    start = 0
    for matrix, end in zip(expected, ends.tolist(), strict=True):
        rows = grad[start:end].float().t() @ x[start:end].float()
        assert_bitwise(matrix, (rows * 2.0**-8).bfloat16())
        start = end


@pytest.mark.parametrize(("a_fmt", "b_fmt", "dtype"), CASES)
@pytest.mark.parametrize(("programs", "halves", "fast"), [(0, 1, True), (1, 2, False)])
def test_formats_results_and_launches(a_fmt, b_fmt, dtype, programs, halves, fast):
    """One program a tile, or two for all of them: what a tile is does not depend on who takes it, nor on halves."""
    tiles = triton.Tiles(rows=32, cols=32, inner=64, tall=3, flatten=True, programs=programs, halves=halves)
    a, b, ends = whole((100, 64), a_fmt, 0), whole((3, 64, 64), b_fmt, 1), ends_of([50, 0, 41])
    arguments = (a, b, ends, *SCALES, dtype)
    assert_bitwise(reference.rows_by_matrices(*arguments), triton.rows_by_matrices(*arguments, fast, tiles))
    a_t, b_t = reference.columns(a, ends), reference.columns(b[0].repeat(2, 1)[:100].contiguous(), ends)
    arguments = (a_t, b_t, ends, *SCALES, dtype)
    assert_bitwise(reference.columns_by_columns(*arguments), triton.columns_by_columns(*arguments, fast, tiles))


def test_a_group_does_not_see_its_neighbours_nans():
    a, b, ends = whole((40, 32), E5M2, 0), whole((2, 32, 32), E4M3, 1), ends_of([9, 20])
    a[:9] = float("nan")
    a[29:] = float("nan")
    found = triton.rows_by_matrices(a, b, ends, *SCALES, torch.bfloat16, False, SMALL)
    assert found[:9].isnan().all() and not found[9:].isnan().any()
    a_t, b_t = triton.columns(a, ends), triton.columns(whole((40, 32), E4M3, 2), ends)
    found = triton.columns_by_columns(a_t, b_t, ends, *SCALES, torch.bfloat16, False, SMALL)
    assert found[0].isnan().all() and not found[1].isnan().any()


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 67, 35), (5, 1, 7), (1, 128, 256), (0, 4, 4)])
def test_transposes_of_several_matrices_equal_the_reference_bitwise(shape):
    from fp8_ds.ops.transpose import transpose_reference
    from fp8_ds.ops.transpose import triton as transpose_triton

    x = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert_bitwise(transpose_reference(x), transpose_triton.transpose(x))
