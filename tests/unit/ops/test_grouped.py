"""The grouped products on CPU, where their reference runs; tests/gpu/kernels has the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.grouped import columns, columns_by_columns, rows_by_matrices
from fp8_ds.ops.grouped.reference import GROUP_BLOCK, num_columns
from fp8_ds.testing import assert_bitwise, sqnr_db

SIZES = [37, 0, 128, 1, 0, 16]
NUM_BEHIND = 5
SCALES = (torch.tensor(0.3), torch.tensor(0.017))


def operands(num_out: int = 48, num_in: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [P, K] E4M3, weight [E, N, K] E4M3, grad_output [P, N] E5M2, ends [E]."""
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(SIZES) + NUM_BEHIND
    x = torch.randn(num_rows, num_in, generator=generator).to(E4M3.dtype)
    weight = torch.randn(len(SIZES), num_out, num_in, generator=generator).to(E4M3.dtype)
    grad = torch.randn(num_rows, num_out, generator=generator).to(E5M2.dtype)
    return x, weight, grad, torch.tensor(SIZES).cumsum(0).int()


def bounds() -> list[tuple[int, slice]]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    return [(group, slice(end - size, end)) for group, (end, size) in enumerate(zip(ends, SIZES, strict=True))]


def assert_same_but_for_sums(expected: Tensor, found: Tensor) -> None:
    """float32 sums in another order, or scales applied before them, may round to the neighbouring bf16."""
    assert float(sqnr_db(expected.float(), found.float())) > 50
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()) * 2**-6)


def test_products_are_those_of_each_group_but_for_the_order_of_sums() -> None:
    x, weight, grad, ends = operands()
    output = rows_by_matrices(x, weight, ends, *SCALES, torch.bfloat16)
    grad_input = rows_by_matrices(grad, weight.mT.contiguous(), ends, *SCALES, torch.bfloat16)
    grad_weight = columns_by_columns(columns(grad, ends), columns(x, ends), ends, *SCALES, torch.bfloat16)
    assert not output[-NUM_BEHIND:].any() and not grad_input[-NUM_BEHIND:].any()
    for group, rows in bounds():
        if rows.start == rows.stop:
            assert not grad_weight[group].any()
            continue
        x_e, w_e, g_e = x[rows], weight[group], grad[rows]
        assert_same_but_for_sums(scaled_mm(x_e, w_e, *SCALES, torch.bfloat16), output[rows])
        assert_same_but_for_sums(scaled_mm(g_e, w_e.t(), *SCALES, torch.bfloat16), grad_input[rows])
        assert_same_but_for_sums(scaled_mm(g_e.t(), x_e.t(), *SCALES, torch.bfloat16), grad_weight[group])


def test_columns_of_a_group_begin_at_a_multiple_with_zeros_behind() -> None:
    x, _, _, ends = operands()
    x_t = columns(x, ends)
    assert x_t.shape == (x.shape[1], num_columns(len(x), len(SIZES))) and x_t.is_contiguous()
    first = 0
    for _, rows in bounds():
        size = rows.stop - rows.start
        end = first + -(-size // GROUP_BLOCK) * GROUP_BLOCK
        assert_bitwise(x_t[:, first : first + size], x[rows].t())
        assert not x_t[:, first + size : end].float().any()
        first = end
    assert first <= x_t.shape[1]


@pytest.mark.parametrize(
    ("num_rows", "num_groups"), [(0, 4), (1, 4), (5, 3), (3, 5), (1000, 1), (1000, 7), (4096, 128)]
)
def test_columns_suffice_for_any_sizes(num_rows: int, num_groups: int) -> None:
    """Worst where as many groups as can be have one row too many."""
    num = num_columns(num_rows, num_groups)
    assert num % GROUP_BLOCK == 0
    generator = torch.Generator().manual_seed(0)
    few = [1] * min(num_groups - 1, num_rows)
    worst = torch.tensor([*few, num_rows - len(few)])
    found = [worst, *(torch.randint(num_groups, (num_rows,), generator=generator).bincount() for _ in range(5))]
    needed = [int(((sizes + GROUP_BLOCK - 1) // GROUP_BLOCK * GROUP_BLOCK).sum()) for sizes in found]
    assert max(needed) <= num


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_rows_or_groups_results_are_empty_or_zeros(dtype: torch.dtype) -> None:
    x, weight, grad, ends = operands()
    none, nobodys = ends.new_zeros(0), ends.new_zeros(2)
    assert rows_by_matrices(x[:0], weight, ends * 0, *SCALES, dtype).shape == (0, 48)
    assert not rows_by_matrices(x, weight[:2], nobodys, *SCALES, dtype).any()
    found = columns_by_columns(columns(grad, nobodys), columns(x, nobodys), nobodys, *SCALES, dtype)
    assert found.shape == (2, 48, 80) and found.dtype == dtype and not found.any()
    assert columns(x, none).shape == (80, 0)
