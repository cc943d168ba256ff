"""Casts in two layouts and by scales of rows and columns; tests/gpu/kernels has the kernels."""

import pytest
import torch
from support import MANY_SCALES, many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import (
    LAYOUTS,
    quantize,
    quantize_and_transpose_delayed,
    quantize_and_transpose_measured,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_rowwise,
    quantize_tensorwise,
)
from fp8_ds.testing import assert_bitwise, sqnr_db

FORMATS = [E4M3, E5M2]
NAN, INF = float("nan"), float("inf")
SCALE = torch.tensor(2.5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (37, 53)])
def test_results_are_quantize_and_its_transpose_in_memory_of_their_own(shape, fmt):
    x = many_scales("per_tile", *shape).bfloat16()
    expected = quantize(x, SCALE, fmt)
    row, col, _, _ = quantize_and_transpose_measured(x, SCALE, 1 / SCALE, fmt, "both")
    assert_bitwise(row, expected)
    assert_bitwise(col, expected.t().contiguous())
    assert row.is_contiguous() and col.is_contiguous() and row.data_ptr() != col.data_ptr()


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_tensorwise_and_delayed_layouts_are_those_of_the_plain_functions(bad):
    x = many_scales("outlier_channel", 9, 21)
    x[5, 6] = bad
    x_fp8, scale_inv = quantize_tensorwise(x, E5M2)
    row, col, found_scale_inv = quantize_and_transpose_tensorwise(x, E5M2, "both")
    for got, expected in ((row, x_fp8), (col.t().contiguous(), x_fp8), (found_scale_inv, scale_inv)):
        assert_bitwise(got, expected)

    slot = torch.tensor(1.0)
    _, col, found_scale_inv = quantize_and_transpose_delayed(x, SCALE, 1 / SCALE, slot, E4M3, "col", record=True)
    assert_bitwise(col.t().contiguous(), quantize(x, SCALE, E4M3))
    before = slot.clone()
    *measured, amax = quantize_and_transpose_measured(x, SCALE, 1 / SCALE, E4M3, "col")
    assert measured[0] is None
    for a, b in zip((*measured[1:], amax), (col, found_scale_inv, slot), strict=True):
        assert_bitwise(a, b)
    quantize_and_transpose_delayed(10 * x, SCALE, 1 / SCALE, slot, E4M3, "row", record=False)
    assert_bitwise(slot, before)


@pytest.mark.parametrize("family", MANY_SCALES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rowwise_is_tensorwise_of_each_row(fmt, family):
    x = many_scales(family, 21, 37).bfloat16()
    x_fp8, scale_inv = quantize_rowwise(x, fmt)
    assert scale_inv.shape == (21, 1)
    for i in range(21):
        row_fp8, row_scale_inv = quantize_tensorwise(x[i], fmt)
        assert_bitwise(x_fp8[i], row_fp8)
        assert_bitwise(scale_inv[i, 0], row_scale_inv)


@pytest.mark.parametrize("fmt", FORMATS)
def test_colwise_is_rowwise_of_the_transpose(fmt):
    x, fold = many_scales("per_column", 21, 37).bfloat16(), torch.rand(21)
    for factor in (None, fold):
        expected, expected_scale_inv = quantize_rowwise(x.t().contiguous(), fmt, factor)
        x_fp8_t, scale_inv = quantize_colwise_t(x, fmt, factor)
        assert_bitwise(x_fp8_t, expected)
        assert_bitwise(scale_inv, expected_scale_inv)
        assert x_fp8_t.is_contiguous() and x_fp8_t.shape == (37, 21) and scale_inv.shape == (37, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fold_is_a_product_in_float32_before_amax_and_cast(dtype):
    x, rows, cols = many_scales("per_tile", 21, 37).to(dtype), torch.rand(21), torch.rand(37)
    by_rows, by_columns = quantize_rowwise(x.float() * cols, E4M3), quantize_colwise_t(x.float() * rows[:, None], E5M2)
    cases = (
        (quantize_rowwise(x, E4M3, cols), by_rows),
        (quantize_rowwise(x, E4M3, cols[:, None]), by_rows),
        (quantize_colwise_t(x, E5M2, rows), by_columns),
        (quantize_colwise_t(x, E5M2, rows[:, None]), by_columns),
    )
    for got, expected in cases:
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])


def test_fold_moves_a_scale_of_the_contracted_axis_into_this_operand():
    """grad_input = grad @ weight, where every row of the weight, which is contracted, has a scale of its own."""
    grad, weight = many_scales("per_row", 24, 40), many_scales("per_row", 40, 16)
    weight_fp8, weight_scale_inv = quantize_rowwise(weight, E4M3)
    grad_fp8, grad_scale_inv = quantize_rowwise(grad, E4M3, weight_scale_inv.flatten())
    grad_input = (grad_fp8.float() @ weight_fp8.float()) * grad_scale_inv
    assert sqnr_db(grad @ weight, grad_input) >= 25.0  # both operands to 3 bits of mantissa: measured 27.9
    without, scale_inv = quantize_rowwise(grad, E4M3)
    assert sqnr_db(grad @ weight, (without.float() @ weight_fp8.float()) * scale_inv) < 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_broken_element_poisons_its_row_or_column_and_no_other(bad):
    x = torch.randn(6, 8)
    x[2, 5] = bad
    for x_fp8, scale_inv, broken in ((*quantize_rowwise(x, E5M2), 2), (*quantize_colwise_t(x, E5M2), 5)):
        is_nan = (x_fp8.float() * scale_inv).isnan().all(dim=1)
        assert is_nan.nonzero().flatten().tolist() == [broken]
        assert scale_inv.isnan().flatten().tolist() == is_nan.tolist()


def test_rows_of_zeros_and_of_no_elements_have_the_smallest_scale_inv():
    zero = 2.0**-126
    x = torch.zeros(3, 4)
    x[1] = 448.0
    for quantized, scale_inv in (quantize_rowwise(x, E4M3), quantize_colwise_t(x.t().contiguous(), E4M3)):
        assert scale_inv.tolist() == [[zero], [1.0], [zero]]
        assert not quantized[::2].float().any()
    for shape in ((0, 4), (4, 0)):
        empty = torch.empty(shape)
        x_fp8, scale_inv = quantize_rowwise(empty, E4M3)
        x_fp8_t, scale_inv_t = quantize_colwise_t(empty, E4M3)
        assert x_fp8.shape == shape and scale_inv.tolist() == [[zero]] * shape[0]
        assert x_fp8_t.shape == shape[::-1] and scale_inv_t.tolist() == [[zero]] * shape[1]
        assert quantize_and_transpose_tensorwise(empty, E4M3, "both")[2] == 1


@pytest.mark.parametrize("shape", [(6, 4), (1, 4), (0, 4)])
def test_ops_pass_opcheck(shape):
    x, one, ops = torch.randn(shape), torch.ones(()), torch.ops.fp8_ds
    checks = ("test_schema", "test_faketensor")
    fmt = (E4M3.dtype, E4M3.max)
    for layout in LAYOUTS:
        torch.library.opcheck(ops.quantize_and_transpose_tensorwise.default, (x, *fmt, layout), test_utils=checks)
        delayed = (x, one, one.clone(), torch.zeros(()), True, *fmt, layout)
        torch.library.opcheck(ops.quantize_and_transpose_delayed.default, delayed, test_utils=checks)
        measured = (x, one, one.clone(), *fmt, layout)
        torch.library.opcheck(ops.quantize_and_transpose_measured.default, measured, test_utils=checks)
    for fold in (False, True):
        rows, cols = (torch.rand(size) if fold else None for size in shape)
        torch.library.opcheck(ops.quantize_rowwise.default, (x, cols, *fmt), test_utils=checks)
        torch.library.opcheck(ops.quantize_colwise_t.default, (x, rows, *fmt), test_utils=checks)
