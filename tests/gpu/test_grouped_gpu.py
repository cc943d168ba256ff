"""The grouped products on CUDA against their references: bitwise where sums are exact, else within their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.waits import host_waits
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.grouped import can_run, columns, columns_by_columns, reference, rows_by_matrices
from fp8_ds.ops.transpose import transpose
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not can_run(torch.device("cuda")), reason="needs compute capability 9.0"),
]

SIZES = {
    "nothing": [0, 0, 0],
    "one": [1],
    "ragged": [37, 0, 640, 1, 0, 130, 128, 127, 129],
    "many": [3, 300, 0, 64, 17] * 26,
    "whole_tiles": [256, 128, 512],
}
CASES = [(512, 256, E5M2, E4M3), (48, 80, E4M3, E4M3), (16, 16, E4M3, E5M2), (1536, 2048, E5M2, E4M3)]
SCALES = (0.3, 2.0**-9)


def whole(shape: tuple[int, ...], fmt: Any, seed: int) -> Tensor:
    """Small whole numbers but 0: sums of 4,096 products are exact in any order, fast ones too."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.tensor([-2.0, -1.0, 1.0, 2.0], device="cuda")
    return values[torch.randint(4, shape, generator=generator, device="cuda")].to(fmt.dtype)


def normal(shape: tuple[int, ...], fmt: Any, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(fmt.dtype)


def on_cuda(*numbers: float) -> list[Tensor]:
    return [torch.full((), number, device="cuda") for number in numbers]


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("num_out", "num_in", "a_fmt", "b_fmt"), CASES)
@pytest.mark.parametrize("fast", [False, True])
def test_exact_sums_equal_the_reference_bitwise(
    sizes: list[int], num_out: int, num_in: int, a_fmt: Any, b_fmt: Any, fast: bool
) -> None:
    num_rows, ends = sum(sizes) + 77, ends_of(sizes)
    a, b = whole((num_rows, num_in), a_fmt, 0), whole((len(sizes), num_out, num_in), b_fmt, 1)
    arguments = (a, b, ends, *on_cuda(*SCALES), torch.bfloat16)
    expected, found = reference.rows_by_matrices(*arguments), rows_by_matrices(*arguments, fast)
    assert_bitwise(expected[: sum(sizes)], found[: sum(sizes)])
    assert not found[sum(sizes) :].any()
    x = whole((num_rows, num_out), b_fmt, 2)
    written = sum(-(-size // 128) * 128 for size in sizes)
    a_t, x_t = columns(a, ends), columns(x, ends)
    assert_bitwise(reference.columns(a, ends)[:, :written], a_t[:, :written])
    assert_bitwise(reference.columns(x, ends)[:, :written], x_t[:, :written])
    arguments = (a_t, x_t, ends, *on_cuda(*SCALES), torch.bfloat16)
    expected, found = reference.columns_by_columns(*arguments), columns_by_columns(*arguments, fast)
    has_rows = torch.tensor(sizes) > 0
    assert_bitwise(expected[has_rows], found[has_rows])
    assert not found[~has_rows].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_others_are_as_exact_as_the_product_of_each_group(dtype: torch.dtype, fast: bool) -> None:
    """At most twice the power of its error; of fast sums, which cuBLAS may cut where rows are few, ten times."""
    sizes = SIZES["ragged"]
    ends, scales = ends_of(sizes), on_cuda(*SCALES)
    a, b = normal((sum(sizes), 2048), E5M2, 0), normal((len(sizes), 512, 2048), E4M3, 1)
    x = normal((sum(sizes), 512), E4M3, 2)
    bounds = [(int(end) - size, int(end), group) for group, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    own = [
        scaled_mm(a[start:end], b[group], *scales, dtype, use_fast_accum=fast)
        for start, end, group in bounds
        if start < end
    ]
    found = rows_by_matrices(a, b, ends, *scales, dtype, fast)
    assert_as_exact(reference.rows_by_matrices(a, b, ends, *scales, torch.float32), torch.cat(own), found, fast)
    transposed = (columns(a, ends), columns(x, ends), ends, *scales)
    own = [
        scaled_mm(a[start:end].t(), x[start:end].t(), *scales, dtype, use_fast_accum=fast) for start, end, _ in bounds
    ]
    found = columns_by_columns(*transposed, dtype, fast)
    assert_as_exact(reference.columns_by_columns(*transposed, torch.float32), torch.stack(own), found, fast)


def assert_as_exact(exact: Tensor, own: Tensor, found: Tensor, fast: bool) -> None:
    db = [float(sqnr_db(exact, one.float())) for one in (own, found)]
    print(f"scaled_mm {db[0]:.1f} dB, grouped {db[1]:.1f}")
    assert db[1] > db[0] - (10 if fast else 3)


def test_accurate_sums_are_as_exact_as_those_of_scaled_mm() -> None:
    """Each group's own product, in float32: both add up in float32 what the tensor core has added up of few terms."""
    sizes = [256, 128]
    ends, (a_inv, b_inv) = ends_of(sizes), on_cuda(*SCALES)
    a, b = normal((384, 8192), E5M2, 0), normal((2, 256, 8192), E4M3, 1)
    exact = (a[:256].double() @ b[0].double().t()) * (a_inv.double() * b_inv.double())
    own = scaled_mm(a[:256], b[0], a_inv, b_inv, torch.float32)
    found = rows_by_matrices(a, b, ends, a_inv, b_inv, torch.float32)[:256]
    fast = rows_by_matrices(a, b, ends, a_inv, b_inv, torch.float32, True)[:256]
    db = [float(sqnr_db(exact, one.double())) for one in (own, found, fast)]
    print(f"scaled_mm {db[0]:.1f} dB, grouped {db[1]:.1f}, fast {db[2]:.1f}")
    assert db[1] > db[0] - 3 and db[1] > db[2] + 6


def test_a_group_does_not_see_its_neighbours_nans() -> None:
    sizes = [9, 200, 31]
    ends, scales = ends_of(sizes), on_cuda(*SCALES)
    x, weight = normal((270, 256), E4M3, 0), normal((3, 128, 256), E4M3, 1)
    x[:9] = float("nan")
    x[209:] = float("nan")
    found = rows_by_matrices(x, weight, ends, *scales, torch.bfloat16)
    assert found[:9].isnan().all() and not found[9:209].isnan().any() and not found[240:].any()
    grads = columns_by_columns(columns(x, ends), columns(x, ends), ends, *scales, torch.bfloat16)
    assert not grads[1].isnan().any() and grads[0].isnan().all() and grads[2].isnan().all()


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 67, 35), (128, 96, 208), (8, 1024, 512)])
def test_matrices_are_transposed_in_one_launch(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, shape, device="cuda").to(torch.uint8)
    assert_bitwise(x.mT.contiguous(), transpose(x))


def test_nothing_waits_for_the_host() -> None:
    ends, scales = ends_of([100, 0, 28]), on_cuda(*SCALES)
    x, weight = normal((128, 64), E4M3, 0), normal((3, 64, 64), E4M3, 1)

    def run() -> None:
        rows_by_matrices(x, weight, ends, *scales, torch.bfloat16)
        columns_by_columns(columns(x, ends), columns(x, ends), ends, *scales, torch.bfloat16)
        transpose(weight)

    run()  # kernels are compiled
    with host_waits() as waits:
        run()
    assert waits.names == []


def test_it_runs_off_the_current_stream_and_in_a_thread_of_its_own() -> None:
    """Autograd's backward has a thread, in which Triton has no allocator for descriptors made on the device."""
    from threading import Thread

    ends, scales = ends_of([100, 0, 28]), on_cuda(*SCALES)
    x, weight, found = normal((128, 64), E4M3, 0), normal((3, 64, 64), E4M3, 1), []
    expected = rows_by_matrices(x, weight, ends, *scales, torch.bfloat16)

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(rows_by_matrices(x, weight, ends, *scales, torch.bfloat16))

    torch.cuda.synchronize()
    thread = Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_bitwise(expected, found[0])
