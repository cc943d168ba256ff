"""Every op has a fake that agrees with it, of empty tensors too, and writes what its schema says alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.producers import make_slot

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops import align, rmsnorm, swiglu, transpose, weighted_sum  # noqa: F401  (each registers its ops)
from fp8_ds.ops.blockwise import quantize_blockwise, quantize_groupwise
from fp8_ds.ops.gemm import blockwise  # noqa: F401
from fp8_ds.ops.grouped import columns
from fp8_ds.ops.quantize import LAYOUTS
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart

Case = tuple[str, tuple[Any, ...]]
FMT, GRAD_FMT = (E4M3.dtype, E4M3.max), (E5M2.dtype, E5M2.max)
BF16, NONE = torch.bfloat16, (None, None, None)
SHAPES = [(6, 4), (1, 4), (0, 4)]


def one() -> torch.Tensor:
    return torch.ones(())


def given() -> tuple[torch.Tensor, ...]:
    slot = make_slot()
    return slot.scale, slot.scale_inv, slot.amax_local


def casts(shape: tuple[int, int]) -> Iterator[Case]:
    x = torch.randn(shape)
    yield "transpose", (torch.randint(-128, 128, shape, dtype=torch.int8),)
    for one_of in (x, x.t().bfloat16()):
        yield "quantize", (one_of, one(), *FMT)
        yield "quantize_tensorwise", (one_of, *GRAD_FMT)
        yield "quantize_tensor_pow2", (one_of, *GRAD_FMT)
        yield "record_amax", (one_of, one())
    yield "quantize_part", (x.flatten(), torch.rand(3, 2) + 0.5, 2, 4, 3, 2, *FMT)
    for layout in LAYOUTS:
        yield "quantize_and_transpose_tensorwise", (x, *FMT, layout)
        yield "quantize_and_transpose_delayed", (x, one(), one(), one(), True, *FMT, layout)
        yield "quantize_and_transpose_measured", (x, one(), one(), *FMT, layout)
    for is_folded in (False, True):
        rows, cols = (torch.rand(size) if is_folded else None for size in shape)
        yield "quantize_rowwise", (x, cols, *FMT)
        yield "quantize_colwise_t", (x, rows, *FMT)
    for block_rows in (1, 128):
        for layouts in ((True, False), (False, True), (True, True)):
            yield "quantize_blockwise", (x, *FMT, block_rows, *layouts)
        yield "block_amax", (x, 0, *shape, block_rows)


def producers() -> Iterator[Case]:
    x, weight = torch.randn(3, 8).bfloat16(), torch.ones(8)
    for with_hp in (False, True):
        yield "swiglu_backward", (x, x, x, with_hp)
        for mode, slots in (
            ("given", (given(), given(), given())),
            ("tensorwise", (NONE,) * 3),
            ("rowwise", (NONE,) * 3),
        ):
            yield "swiglu", (x, x, mode, *slots[0], *FMT, with_hp)
            yield "rmsnorm", (x, weight, 1e-5, mode, *slots[0], *FMT, with_hp)
            if mode != "rowwise":
                yield "swiglu_backward_to_fp8", (x, x, x, mode, *slots[0], *slots[1], *GRAD_FMT, with_hp)
                yield "swiglu_columns", (x, x, None, None, mode, *slots[0][:2], None, *FMT)
                tail = (mode, *slots[0][:2], None, *slots[1], *slots[2], *FMT, *GRAD_FMT)
                yield "swiglu_backward_and_columns", (x, x, x, None, None, *tail)
                codes, scale_inv = quantize_groupwise(x)
                yield "swiglu_backward_and_columns", (x, codes, codes, scale_inv, scale_inv, *tail)
    yield "rmsnorm_backward", (x, x, weight, torch.ones(3))


def products() -> Iterator[Case]:
    a, b = torch.randn(17, 48).to(E4M3.dtype), torch.randn(2, 16, 48).to(E4M3.dtype)
    ends = torch.tensor([5, 17], dtype=torch.int32)
    for backend in ("torch", "reference"):
        yield "scaled_mm", (a, b[0], one(), one(), BF16, False, backend)
        for block_rows in (1, 128):
            blocks = quantize_blockwise(torch.randn(16, 48), E4M3, (block_rows, 128), "row")
            yield "scaled_mm_blockwise", (a, blocks.x_fp8, torch.ones(1, 17).t(), blocks.scale_inv, BF16, backend)
    yield "grouped_columns", (a.view(torch.int8), ends)
    yield "grouped_rows_by_matrices", (a, b, ends, one(), one(), BF16, True)
    yield "grouped_columns_by_columns", (columns(a, ends), columns(a, ends), ends, one(), one(), torch.float32, False)
    yield "align", (a, torch.ones(17))
    yield "transpose_blockwise", (a, torch.ones(1, 17).t(), E4M3.max)
    yield "dequantize_groupwise", (a, torch.ones(17, 1))
    rows, place, weights = torch.randn(18, 20), torch.randperm(18), torch.rand(6, 3)
    yield "weighted_sum", (rows, place, weights, BF16)
    yield "weighted_sum_backward", (torch.randn(6, 20), rows, place, weights)
    for launch in MultiTensorQuantize(
        [QuantizePart(torch.randn(64), torch.zeros(64).to(E4M3.dtype), one())], E4M3
    )._launches:
        lists = launch.xs, launch.outs, launch.grids, launch.places
        flags = launch.has_one_scale, launch.is_vector, E4M3.max
        yield "quantize_parts", (launch.table, launch.program_parts, *lists, *flags)


CASES = [*(case for shape in SHAPES for case in casts(shape)), *producers(), *products()]


def has_fp8(args: tuple[Any, ...]) -> bool:
    flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize == 1 for x in flat)


@pytest.mark.parametrize(("name", "args"), CASES, ids=[f"{number}-{name}" for number, (name, _) in enumerate(CASES)])
def test_the_fake_agrees_with_the_op(name: str, args: tuple[Any, ...]) -> None:
    # The check of the schema compares arguments before and after by arithmetic that torch's FP8 dtypes have not.
    checks = ("test_faketensor",) if has_fp8(args) else ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.fp8_ds, name).default, args, test_utils=checks)


def test_every_op_of_this_package_is_among_them() -> None:
    """But for those that are tested with their own modules."""
    elsewhere = ("attention_", "observe_", "table")
    names = [name.removeprefix("fp8_ds::") for name in torch._C._dispatch_get_all_op_names() if name[:8] == "fp8_ds::"]
    assert {name for name in names if not name.startswith(elsewhere)} <= {name for name, _ in CASES}
