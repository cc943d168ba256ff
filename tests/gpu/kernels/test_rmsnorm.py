"""The RMSNorm kernels against the reference on a CPU, bit for bit."""

import pytest
import torch
from support.kernels import DEVICE, INTERPRETED, KERNEL, assert_all_same, check, to_device, with_cuda_sizes
from support.producers import SCALINGS, make_rows, make_scaling

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops._device import FROM_AMAX
from fp8_ds.ops._producer import mode_of
from fp8_ds.ops.rmsnorm import MAX_COLS, reference
from fp8_ds.ops.rmsnorm import triton as kernels
from fp8_ds.ops.rmsnorm.kernel import rmsnorm_kernel, sum_partials_kernel

pytestmark = KERNEL

NAN, INF = float("nan"), float("inf")
CUDA_SHAPES = [(5, 1000), (64, 4096), (33, 5120), (17, 8200), (2, 14336), (3, 16384), (2, MAX_COLS), (8192, 1024)]
"""The last has more programs than a device holds at once."""


def weight_of(num_cols, dtype=torch.bfloat16):
    return (torch.randn(num_cols, generator=torch.Generator().manual_seed(7)) + 1).to(dtype)


def assert_forward_equal(
    x, weight, scaling, fmt=E4M3, twice=False, record=True, eps=1e-5, amax=0.0, view=lambda x: x
):  # fmt: skip
    scalings, results = [make_scaling(scaling, device, amax=amax) for device in ("cpu", DEVICE)], []
    for module, one, arguments in zip((reference, kernels), scalings, ((x, weight), to_device(x, weight)), strict=True):
        mode, slot = mode_of(one, record)
        results.append(module.rmsnorm(view(arguments[0]), arguments[1], eps, mode, *slot, fmt.dtype, fmt.max, twice))
    assert_all_same(*results)
    if scaling == "given":
        assert_all_same(scalings[0].amax_local, scalings[1].amax_local)
        return scalings[1].amax_local
    return None


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", with_cuda_sizes([(1, 1), (2, 1024), (3, 1500)], CUDA_SHAPES), ids=str)
def test_forward_equals_reference_bitwise(shape, scaling):
    x = make_rows(*shape)
    assert_forward_equal(x, weight_of(shape[1]), scaling, E4M3)
    assert_forward_equal(x, weight_of(shape[1], torch.float32), scaling, E5M2, twice=True)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_edges_equal_reference_bitwise(scaling):
    """Zeros, bf16's subnormals, squares below and above float32, a NaN, infinities."""
    rows = make_rows(8, 40)
    rows[0] = 0
    rows[1] = torch.tensor([2.0**-133, -(2.0**-130)]).bfloat16().repeat(20)
    rows[2] = 2.0**-75
    rows[3] = 2.0**100
    rows[4, 3] = NAN
    rows[5, 4] = INF
    rows[6, 5] = -INF
    for x in (rows[:4], rows[4:]):
        assert_forward_equal(x, weight_of(40), scaling)
    assert_forward_equal(rows[:4], weight_of(40), scaling, eps=0.0)  # zeros over a root of zero are NaN
    weight = weight_of(40)
    weight[5] = INF
    assert_forward_equal(make_rows(3, 40), weight, scaling)


@pytest.mark.parametrize("scaling", ["given", "rowwise"])
@pytest.mark.parametrize(
    "shape",
    with_cuda_sizes(
        [(6, 1500), (7, 1500)], [(1601, 4096), (601, 5120), (600, 8192), (301, 16384), (300, MAX_COLS)]
    ),
)  # fmt: skip
def test_programs_that_take_several_rows_equal_reference_bitwise(shape, scaling, monkeypatch):
    """In the interpreter two programs have three or four rows each; the largest, and then what is not finite, in each
    of their turns."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "_AHEAD_WARPS", 2)
    weight, (num_rows, num_cols) = weight_of(shape[1]), shape
    for row in (0, num_rows // 2, num_rows - 1):
        x = make_rows(*shape)
        x[1], x[row, num_cols - 1] = -0.0, 1e6
        assert_forward_equal(x, weight, scaling)
    for edge in (NAN, INF, -INF, 3e38):
        x[4, num_cols - 1], x[2, 0] = edge, 1.0
        assert_forward_equal(x, weight, scaling, E5M2, twice=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_rounding_of_the_cast_equals_reference_bitwise(fmt):
    """All finite bf16 numbers by a scale of 1: halfway cases, subnormals of FP8, saturation."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite(), bits, 0).view(4, -1)
    mode, slot = mode_of(make_scaling("given", scale=1.0))
    expected = reference.quantize_by(x, mode, slot, fmt.dtype, fmt.max)[0]
    # rstd is 1 in the second pass of tensorwise, whose amax stands for a scale of 1: the values themselves are cast.
    moved, ones, one, amax = to_device(x, torch.ones(x.shape[1]), torch.empty(()), torch.tensor(fmt.max))
    got = torch.empty_like(expected, device=DEVICE)
    options = {} if INTERPRETED else {"num_warps": 16, "enable_fp_fusion": False}
    rmsnorm_kernel[(4,)](
        moved, ones, got.view(torch.uint8), torch.empty_like(moved), ones, one, amax, x.shape[1], x.stride(0), 0.0,
        MODE=FROM_AMAX, TWICE=False, FP8_MAX=fmt.max, BLOCK=16384, PTX=not INTERPRETED, **options,
    )  # fmt: skip
    assert_all_same(expected, got)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 40:240],
        lambda x: x[::2, :200],
        lambda x: x[:1, :200].expand(3, 200),
        lambda x: x[:, 1:201],
        lambda x: x[:, 8:208],
    ],
)
def test_rows_of_a_wider_tensor_equal_reference_bitwise(view):
    assert_forward_equal(make_rows(3, 300), weight_of(200), "rowwise", view=view)


def test_amax_is_maximumed_only_when_recorded():
    x = make_rows(3, 50)
    assert assert_forward_equal(x, weight_of(50), "given") > 0
    assert assert_forward_equal(x, weight_of(50), "given", record=False) == 0
    assert assert_forward_equal(x, weight_of(50), "given", amax=1e9) == 1e9


def backward_both(grad, x, weight):
    check(reference, kernels, "rmsnorm_backward", grad, x, weight, reference.rstd_of(x, 1e-5))


@pytest.mark.parametrize(
    "shape",
    with_cuda_sizes(
        [(1, 1), (16, 8), (35, 130), (3, 1500)], [*CUDA_SHAPES, (8200, 512), (4300, 4096), (2200, 8192)]
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_equals_reference_bitwise(shape, dtype):
    backward_both(make_rows(*shape, 1), make_rows(*shape, 0), weight_of(shape[1], dtype))


def test_backward_of_strided_rows_and_edges_equals_reference_bitwise():
    x, grad = (make_rows(20, 90, seed) for seed in range(2))
    x[3], grad[4, 10], x[5, 11] = 0, NAN, INF
    arguments = weight_of(50), reference.rstd_of(x[:, 10:60], 1e-5)
    expected = reference.rmsnorm_backward(grad[:, 10:60], x[:, 10:60], *arguments)
    views = [one.to(DEVICE)[:, 10:60] for one in (grad, x)]
    assert_all_same(expected, kernels.rmsnorm_backward(*views, *to_device(*arguments)))


@pytest.mark.parametrize(
    "shape", [pytest.param((70, 200), marks=pytest.mark.slow), (64, 40), (33, 40), (17, 1)], ids=str
)
def test_programs_that_take_several_partial_sums_equal_reference_bitwise(shape, monkeypatch):
    """In the interpreter two programs have one to three each, the last of which is whole, cut or one row; edges at
    their ends."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "_BACKWARD_WARPS", 1)
    x, grad = (make_rows(*shape, seed) for seed in range(2))
    x[15], x[-1, 0], grad[16, -1] = 0, -0.0, 1e6
    for edge in (1.0, NAN, INF):
        grad[-1, 0] = edge
        backward_both(grad, x, weight_of(shape[1]))


@pytest.mark.parametrize("num_partials", [1, 128, 129, 384, 512])
def test_sum_of_partials_equals_reference_bitwise(num_partials):
    partial = make_rows(num_partials, 40).float() * 1.1
    got = torch.empty(40, device=DEVICE)
    sum_partials_kernel[(5,)](partial.to(DEVICE), got, num_partials, 40, STEPS=-(-num_partials // 128), COLS=8)
    assert_all_same(reference.sum_partials(partial), got)
