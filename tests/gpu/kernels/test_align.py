"""The kernel of ops/align against its reference."""

import pytest
import torch
from support.kernels import KERNEL, assert_all_same, to_device, with_cuda_sizes

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.align import align_reference, triton

pytestmark = KERNEL


def check(x_fp8, scale_inv):
    assert_all_same(align_reference(x_fp8, scale_inv), triton.align(*to_device(x_fp8, scale_inv)))


@pytest.mark.parametrize(
    ("shape", "fmt"),
    with_cuda_sizes([((1, 1), E4M3), ((80, 144), E4M3), ((65, 9), E5M2), ((7, 32), E5M2)], [((4096, 2048), E4M3)]),
)
def test_kernel_equals_reference_for_every_code_and_shift(fmt, shape):
    """With scales that a kernel finds the largest of, and with more."""
    codes = (torch.arange(shape[0] * shape[1]) % 251).to(torch.uint8).reshape(shape)
    codes[(codes & 0x7F) > 0x7B] = 0  # NaN and infinity: their signs may differ
    check(codes.view(fmt.dtype), torch.exp2(-(torch.arange(shape[0]) % 40).float()))


def test_more_scales_than_a_kernel_looks_at_and_fewer_than_rows_equal_reference():
    check(torch.ones(40, 16).to(E4M3.dtype), torch.exp2(-(torch.arange(20) % 7).float()))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("num_rows", [16, 32])
def test_what_is_not_a_number_stays_so(fmt, num_rows):
    x_fp8 = torch.ones(num_rows, 16).to(fmt.dtype)
    x_fp8[3, 5] = float("nan")
    x_fp8, scale_inv = to_device(x_fp8, torch.ones(num_rows))
    found = triton.align(x_fp8, scale_inv)[0].float().isnan()
    assert found[5, 3] and int(found.sum()) == 1
    scale_inv[7] = float("nan")
    assert triton.align(x_fp8, scale_inv)[0].float().isnan().all()


@pytest.mark.parametrize(
    ("scales", "fmt"),
    [
        ([0.5], E4M3),
        ([0.25, 2.0], E5M2),
        ([2.0**-120, 1.0, 2.0**-3], E4M3),
        ([0.0, 0.0], E5M2),
        ([1.0, float("nan")], E4M3),
    ],
)
def test_few_scales_and_their_largest_are_found_in_the_launch(fmt, scales):
    codes = (torch.arange(12 * 9) % 0x78).to(torch.uint8).view(12, 9)
    check(codes.view(fmt.dtype), torch.tensor(scales))
