"""The RMSNorm kernels in Triton's interpreter against the reference. test_interpreted.py runs this file in a child."""

import pytest
import torch
from support.producers import SCALINGS, assert_same, make_rows, make_scaling

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops._device import FROM_AMAX
from fp8_ds.ops._producer import mode_of
from fp8_ds.ops.rmsnorm import reference
from fp8_ds.ops.rmsnorm import triton as kernels
from fp8_ds.ops.rmsnorm.kernel import sum_partials_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where infinities arise

NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1), (2, 1024), (3, 1500)]


def weight_of(num_cols, dtype=torch.bfloat16):
    return (torch.randn(num_cols, generator=torch.Generator().manual_seed(7)) + 1).to(dtype)


def assert_forward_equal(x, weight, scaling, fmt=E4M3, twice=False, record=True, eps=1e-5, amax=0.0):
    scalings, results = [make_scaling(scaling, amax=amax) for _ in range(2)], []
    for module, one in zip((reference, kernels), scalings, strict=True):
        mode, slot = mode_of(one, record)
        results.append(module.rmsnorm(x, weight, eps, mode, *slot, fmt.dtype, fmt.max, twice))
    for a, b in zip(*results, strict=True):
        assert_same(a, b)
    if scaling == "given":
        assert_same(scalings[0].amax_local, scalings[1].amax_local)
        return scalings[1].amax_local
    return None


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
@pytest.mark.parametrize("num_rows", [6, 7])
def test_programs_that_take_several_rows_equal_reference_bitwise(num_rows, scaling, monkeypatch):
    """Two programs have three or four rows each; the largest, and then what is not finite, in each of their turns."""
    monkeypatch.setattr(kernels, "_AHEAD_WARPS", 2)
    weight = weight_of(1500)
    for row in (0, 3, num_rows - 1):
        x = make_rows(num_rows, 1500)
        x[1], x[row, 1499] = -0.0, 1e6
        assert_forward_equal(x, weight, scaling)
    for edge in (NAN, INF, -INF, 3e38):
        x[4, 1499], x[2, 0] = edge, 1.0
        assert_forward_equal(x, weight, scaling, E5M2, twice=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_rounding_of_the_cast_equals_reference_bitwise(fmt):
    """All finite bf16 numbers by a scale of 1: halfway cases, subnormals of FP8, saturation."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite(), bits, 0).view(4, -1)
    mode, slot = mode_of(make_scaling("given", scale=1.0))
    ones = torch.ones(x.shape[1])
    expected = reference.quantize_by(x, mode, slot, fmt.dtype, fmt.max)[0]
    # rstd is 1 in the second pass of tensorwise, whose amax stands for a scale of 1: the values themselves are cast.
    got = torch.empty_like(expected)
    kernels.rmsnorm_kernel[(4,)](
        x, ones, got.view(torch.uint8), torch.empty_like(x), torch.ones(4), torch.empty(()), torch.tensor(fmt.max),
        x.shape[1], x.stride(0), 0.0, MODE=FROM_AMAX, TWICE=False, FP8_MAX=fmt.max, BLOCK=16384, PTX=False,
    )  # fmt: skip
    assert_same(expected, got)


def test_rows_of_a_wider_tensor_equal_reference_bitwise():
    wide = make_rows(3, 300)
    for x in (wide[:, 40:240], wide[::2, :200], wide[:1, :200].expand(3, 200)):
        assert_forward_equal(x, weight_of(200), "rowwise")


def test_amax_is_maximumed_only_when_recorded():
    x = make_rows(3, 50)
    assert assert_forward_equal(x, weight_of(50), "given") > 0
    assert assert_forward_equal(x, weight_of(50), "given", record=False) == 0
    assert assert_forward_equal(x, weight_of(50), "given", amax=1e9) == 1e9


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (35, 130), (3, 1500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_equals_reference_bitwise(shape, dtype):
    x, grad = (make_rows(*shape, seed) for seed in range(2))
    arguments = grad, x, weight_of(shape[1], dtype), reference.rstd_of(x, 1e-5)
    for a, b in zip(reference.rmsnorm_backward(*arguments), kernels.rmsnorm_backward(*arguments), strict=True):
        assert_same(a, b)


def test_backward_of_strided_rows_and_edges_equals_reference_bitwise():
    x, grad = (make_rows(20, 90, seed)[:, 10:60] for seed in range(2))
    x[3], grad[4, 0], x[5, 1] = 0, NAN, INF
    arguments = grad, x, weight_of(50), reference.rstd_of(x, 1e-5)
    for a, b in zip(reference.rmsnorm_backward(*arguments), kernels.rmsnorm_backward(*arguments), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("shape", [(70, 200), (64, 40), (33, 40), (17, 1)], ids=str)
def test_programs_that_take_several_partial_sums_equal_reference_bitwise(shape, monkeypatch):
    """Two programs have one to three each, the last of which is whole, cut or one row; edges at their ends."""
    monkeypatch.setattr(kernels, "_BACKWARD_WARPS", 1)
    x, grad = (make_rows(*shape, seed) for seed in range(2))
    x[15], x[-1, 0], grad[16, -1] = 0, -0.0, 1e6
    arguments = [grad, x, weight_of(shape[1]), reference.rstd_of(x, 1e-5)]
    for edge in (1.0, NAN, INF):
        grad[-1, 0] = edge
        for a, b in zip(reference.rmsnorm_backward(*arguments), kernels.rmsnorm_backward(*arguments), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("shape", [(70, 200), (64, 40)], ids=str)
def test_partial_sums_of_more_rows_equal_reference_bitwise(shape, monkeypatch):
    """Of 24 and 22 rows, where three are all that a matrix may have."""
    monkeypatch.setattr(reference, "MAX_PARTIALS", 3)
    x, grad = (make_rows(*shape, seed) for seed in range(2))
    assert reference.rows_per_partial(*shape) == -(-shape[0] // 3) > reference.MIN_ROWS_PER_PARTIAL
    arguments = grad, x, weight_of(shape[1]), reference.rstd_of(x, 1e-5)
    for a, b in zip(reference.rmsnorm_backward(*arguments), kernels.rmsnorm_backward(*arguments), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("shape", "num_programs", "num_warps"),
    [
        ((1, 1), 1, 2),
        ((16, 8), 1, 2),
        ((17, 8), 2, 2),
        ((8192, 8), 512, 2),
        ((8192, 2048), 512, 4),
        ((8193, 2048), 482, 4),
        ((8192, 4096), 256, 8),
        ((65536, 5120), 128, 16),
        ((8192, 8192), 128, 16),
        ((8192, 16384), 128, 32),
        ((16, 8192), 1, 16),
    ],
    ids=str,
)
def test_backward_has_a_partial_sum_for_each_program(shape, num_programs, num_warps, monkeypatch):
    """On 132 processors, as many as an H100 has; for each eight columns a program adds them up."""
    launched = []
    monkeypatch.setattr(kernels, "num_processors", lambda device: 132)
    monkeypatch.setattr(kernels, "launch", lambda kernel, count, *args, **options: launched.append((count, options)))
    x, rstd = torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.empty(shape[0], device="meta")
    kernels.rmsnorm_backward(x, x, x[0], rstd)
    (programs, options), (sums, _) = launched
    assert (programs, options["num_warps"], sums) == (num_programs, num_warps, -(-shape[1] // 8))
    assert programs * 16 - 15 <= shape[0]


@pytest.mark.parametrize("num_partials", [1, 128, 129, 384, 512])
def test_sum_of_partials_equals_reference_bitwise(num_partials):
    partial = make_rows(num_partials, 40).float() * 1.1
    got = torch.empty(40)
    sum_partials_kernel[(5,)](partial, got, num_partials, 40, STEPS=-(-num_partials // 128), COLS=8)
    assert_same(reference.sum_partials(partial), got)
