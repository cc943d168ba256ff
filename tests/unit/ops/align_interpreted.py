"""The kernel of ops/align in Triton's interpreter against its reference. test_interpreted.py runs this file."""

import pytest
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.align import align_reference, ratios, shift_transpose, triton
from fp8_ds.testing import assert_bitwise

COVERING = [((1, 1), E4M3), ((80, 144), E4M3), ((65, 9), E5M2), ((7, 32), E5M2)]
"""With scales that a kernel finds the largest of, and with more."""
OTHERS = [(shape, E5M2 if fmt is E4M3 else E4M3) for shape, fmt in COVERING]


@pytest.mark.parametrize(
    ("shape", "fmt"), [*COVERING, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_kernel_equals_reference_for_every_code_and_shift(fmt, shape):
    codes = (torch.arange(shape[0] * shape[1]) % 251).to(torch.uint8).reshape(shape)
    codes[(codes & 0x7F) > 0x7B] = 0  # NaN and infinity: their signs may differ
    scale_inv = torch.exp2(-(torch.arange(shape[0]) % 40).float())
    x_fp8 = codes.view(fmt.dtype)
    for found, expected in zip(triton.align(x_fp8, scale_inv), align_reference(x_fp8, scale_inv), strict=True):
        assert_bitwise(found, expected)


def test_more_scales_than_a_kernel_looks_at_and_fewer_than_rows_equal_reference():
    x_fp8, scale_inv = torch.ones(40, 16).to(E4M3.dtype), torch.exp2(-(torch.arange(20) % 7).float())
    for found, expected in zip(triton.align(x_fp8, scale_inv), align_reference(x_fp8, scale_inv), strict=True):
        assert_bitwise(found, expected)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_what_is_not_a_number_stays_so(fmt):
    for num_rows in (16, 32):
        x_fp8 = torch.ones(num_rows, 16).to(fmt.dtype)
        x_fp8[3, 5] = float("nan")
        found = triton.align(x_fp8, torch.ones(num_rows))[0].float().isnan()
        assert found[5, 3] and int(found.sum()) == 1
        scale_inv = torch.ones(num_rows)
        scale_inv[7] = float("nan")
        assert triton.align(x_fp8, scale_inv)[0].float().isnan().all()


FEW = [
    ([0.5], E4M3),
    ([0.25, 2.0], E5M2),
    ([2.0**-120, 1.0, 2.0**-3], E4M3),
    ([0.0, 0.0], E5M2),
    ([1.0, float("nan")], E4M3),
]
MORE = [(scales, E5M2 if fmt is E4M3 else E4M3) for scales, fmt in FEW]


@pytest.mark.parametrize(("scales", "fmt"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_few_scales_and_their_largest_are_found_in_the_launch(fmt, scales):
    codes = (torch.arange(12 * 9) % 0x78).to(torch.uint8).view(12, 9)
    x_fp8, scale_inv = codes.view(fmt.dtype), torch.tensor(scales)
    ratio, largest = ratios(scale_inv)
    found, found_largest = triton.align(x_fp8, scale_inv)
    expected = shift_transpose(x_fp8, ratio)
    if largest.isnan():
        assert found_largest.isnan() and found.float().isnan().all() and expected.float().isnan().all()
    else:
        assert_bitwise(found, expected)
        assert_bitwise(found_largest, largest)
