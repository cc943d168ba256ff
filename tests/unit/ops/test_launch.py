"""`launch` hands Triton's launcher what Triton itself would, for the same compiled kernel: with a driver that is none.

Kernels are compiled for Hopper as on a machine that has one; only what would load and start them is replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from stand_in_driver import StandInDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fp8_ds.ops import _launch  # noqa: E402
from fp8_ds.ops._launch import launch  # noqa: E402

DRIVER = StandInDriver()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    monkeypatch.setattr(_launch, "_known", {})
    monkeypatch.setattr(driver, "_active", DRIVER)  # reset_active() would look for a GPU
    DRIVER.launched.clear()
    return DRIVER


@triton.jit
def scaled_copy_kernel(x, out, offset, num, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):
    at = tl.arange(0, BLOCK)
    inside = at < num
    value = tl.load(x + at + offset, inside, 0.0) * factor
    if out is not None:
        tl.store(out + at, value + value if TWICE else value, inside)


X = torch.arange(64.0)
FIRST = {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": False}
CASES: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (2, (X, X, 3, 16, 0.5), FIRST),
    (3, (X, X, 5, 16, 0.5), FIRST),
    (1, (X[4:], X, 3, 16, 0.5), FIRST),
    (1, (X[1:], X, 3, 16, 0.5), FIRST),
    (1, (X, None, 3, 16, 0.5), FIRST),
    (1, (X, X, 1, 16, 0.5), FIRST),
    (1, (X, X, 3, 1, 0.5), FIRST),
    (1, (X, X, 0, 17, 0.25), FIRST),
    (1, (X, X, 2**31 - 1, 17, 0.25), FIRST),
    (1, (X, X, 2**31, 17, 0.25), FIRST),
    (1, (X, X, 2**40 + 1, 17, 0.25), FIRST),
    (1, (X.double(), X, 3, 16, 0.5), FIRST),
    (1, (X, X, 3, 16, 0.5), {**FIRST, "BLOCK": 32}),
    (1, (X, X, 3, 16, 0.5), {**FIRST, "num_warps": 2}),
    (1, (X, X, 3, 16, 0.5), {**FIRST, "TWICE": True}),
    (1, (X, X, 3, 16, 0.5), {**FIRST, "enable_fp_fusion": True}),
]


def by_triton(num_programs: int, *args: Any, **constants: Any) -> None:
    scaled_copy_kernel[(num_programs,)](*args, **constants)


def by_us(num_programs: int, *args: Any, **constants: Any) -> None:
    launch(scaled_copy_kernel, num_programs, *args, **constants)


def test_launches_are_those_of_triton_whatever_came_before(fake: StandInDriver) -> None:
    for num_programs, args, constants in CASES:
        by_triton(num_programs, *args, **constants)
    expected = fake.launched[:]
    assert len({launcher for launcher, _ in expected}) >= 11, "cases compile to kernels of their own"
    for _ in range(2):  # what is new, and what is known
        fake.launched.clear()
        for num_programs, args, constants in CASES:
            by_us(num_programs, *args, **constants)
        assert fake.launched == expected


def test_no_two_arguments_that_triton_tells_apart_share_a_key(fake: StandInDriver) -> None:
    integers = (0, 1, 2, 15, 16, 17, -1, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), 2**63 - 1, 2**63, -(2**63))
    numbers = (*integers, 0.5, 1.0, None)
    tensors = [X[k:] for k in (0, 1, 4)] + [X.double(), X.bfloat16(), X.to(torch.uint8)]
    _, _, _, backend, _ = scaled_copy_kernel.device_caches[0]
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    for a, b in itertools.combinations((*numbers, *tensors), 2):
        theirs = [specialize(backend, arg, False, True, True) for arg in (a, b)]
        if theirs[0] != theirs[1]:
            assert _launch._specialized(a) != _launch._specialized(b), (a, b)


def test_hooks_other_devices_amds_gpus_and_kernels_still_being_compiled_take_tritons_own_way(
    fake: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, called = scaled_copy_kernel.run, []
    others: list[tuple[Any, str, Any]] = [
        (scaled_copy_kernel, "run", lambda *args, **kwargs: stock(*args, **kwargs) and None),
        (_launch, "_BY_TRITON", True),
        (Tensor, "get_device", lambda self: 1),
        (scaled_copy_kernel, "pre_run_hooks", [lambda *args, **kwargs: called.append(args)]),
    ]
    for owner, name, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(owner, name, value)
            by_us(1, X, X, 3, 16, 0.5, **FIRST)
    assert len(fake.launched) == len(others) and not _launch._known and len(called) == 1
    by_us(1, X, X, 3, 16, 0.5, **FIRST)
    assert len(fake.launched) == len(others) + 1 and len(_launch._known) == 1


def ops() -> dict[str, Callable[[], Any]]:
    """Of this package, by name: kernels as they are launched."""
    from fp8_ds.ops.grouped import triton as grouped
    from fp8_ds.ops.quantize import triton as quantize
    from fp8_ds.ops.swiglu import triton as swiglu
    from fp8_ds.ops.transpose import triton as transpose
    from fp8_ds.ops.weighted_sum import triton as weighted

    x = torch.ones(64, 128, dtype=torch.bfloat16)
    place, by = torch.arange(64), torch.ones(32, 2)
    x_fp8 = x.to(torch.float8_e4m3fn)
    scalars = (torch.ones(()), torch.ones(()), torch.zeros(()))
    ends, scales = torch.tensor([5, 64], dtype=torch.int32), (torch.ones(()), torch.ones(()))
    weight, columns = x_fp8.view(2, 32, 128), x_fp8.view(32, 256)
    return {
        "transpose": lambda: transpose.transpose(x_fp8),
        "tensorwise": lambda: quantize.quantize_and_transpose_tensorwise(x, torch.float8_e4m3fn, 448.0, "both"),
        "delayed": lambda: quantize.quantize_and_transpose_delayed(
            x, *scalars, True, torch.float8_e5m2, 57344.0, "row"
        ),
        "grouped_rows": lambda: grouped.rows_by_matrices(x_fp8, weight, ends, *scales, torch.bfloat16, True),
        "grouped_columns": lambda: grouped.columns(x_fp8, ends),
        "grouped_matrices": lambda: grouped.columns_by_columns(columns, columns, ends, *scales, torch.float32, False),
        "swiglu_backward": lambda: swiglu.swiglu_backward(x, x, x, False),
        "weighted_sum": lambda: weighted.weighted_sum(x, place, by, torch.bfloat16),
        "weighted_sum_backward": lambda: weighted.weighted_sum_backward(x[:32], x, place, by),
    }


def test_our_kernels_get_what_triton_would_give_them(fake: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for addresses of what an op allocates."""
    for name, op in ops().items():
        seen: list[list[Any]] = []
        for by_triton in (False, False, True):  # new, known, Triton's own way
            monkeypatch.setattr(_launch, "_BY_TRITON", by_triton)
            fake.launched.clear()
            op()
            seen.append([(who, [a[0] if isinstance(a, tuple) else a for a in args]) for who, args in fake.launched])
        assert seen[0] == seen[1] == seen[2] != [], name


def test_a_format_of_a_descriptors_tensor_is_another_kernel(fake: StandInDriver) -> None:
    from fp8_ds.ops.grouped import triton as grouped

    x = torch.ones(64, 128).to(torch.float8_e4m3fn)
    ends, scales = torch.tensor([5, 64], dtype=torch.int32), (torch.ones(()), torch.ones(()))
    for rows in (x, x.to(torch.float8_e5m2), x, x.to(torch.float8_e5m2)):
        grouped.rows_by_matrices(rows, x.view(2, 32, 128), ends, *scales, torch.bfloat16, False)
    launchers = [launcher for launcher, _ in fake.launched]
    assert launchers[:2] == launchers[2:] and launchers[0] != launchers[1]


@pytest.mark.parametrize(
    ("dtype", "fast"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_grouped_products_fit_as_many_programs_as_run_at_a_time(
    fake: StandInDriver, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fast: bool
) -> None:
    """Hopper has 227 KiB for a program, and 228 for those of a multiprocessor, of which each takes one more.

    Source: CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
    """
    from fp8_ds.ops.grouped import triton as grouped

    shared: list[int] = []

    def launched(kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        shared.append(kernel[(num_programs,)](*args, **constants).metadata.shared)

    monkeypatch.setattr(grouped, "launch", launched)
    x, weight = torch.ones(8, 128).to(torch.float8_e5m2), torch.ones(1, 16, 128).to(torch.float8_e4m3fn)
    ends, scales = torch.tensor([8], dtype=torch.int32), (torch.ones(()), torch.ones(()))
    by_rows = {grouped.rows_tiles(n, k, dtype, fast) for n in (16, 128, 2048) for k in (16, 768, 4096)}
    for tiles in by_rows:
        grouped.rows_by_matrices(x, weight, ends, *scales, dtype, fast, tiles)
    by_columns = {grouped.matrices_tiles(8 * mean, 8, fast) for mean in (128, 639, 2175)}
    for tiles in by_columns:
        grouped.columns_by_columns(x, weight[0], ends, *scales, dtype, fast, tiles)
    assert len(by_columns) == 2
    for tiles, num_bytes in zip([*by_rows, *by_columns], shared, strict=True):
        assert num_bytes <= 227 * 1024 and tiles.programs * (num_bytes + 1024) <= 228 * 1024, (tiles, num_bytes)
