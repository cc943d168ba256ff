"""Products of FP8 matrices by groups of rows, all groups in one launch, for a mixture of experts.

Shape suffixes: P rows, sorted by group, E groups, N output and K input features, Q columns. Each operand has one scale:

    output[P, N]         = rows_by_matrices(x[P, K],           weight[E, N, K])
    grad_input[P, K]     = rows_by_matrices(grad_output[P, N], weight[E, N, K].mT)
    grad_weight[E, N, K] = columns_by_columns(columns(grad_output), columns(x))

where `columns`, [N, Q] and [K, Q], are transposes in which the rows of each group begin at a multiple of 128, for
Hopper's FP8 product reads both operands along the dim that it contracts. Nothing waits for the host: how many rows each
group has is read by the kernels, and their programs are as many as the GPU can run at a time.

Kernels want an NVIDIA GPU of compute capability 9.0 or later (TMA) but 12.x, which has 99 KiB of shared memory for a
program: three tiles of both operands take up to 144 (CUDA programming guide, compute capabilities). Sums are kept as in
`ops/gemm`: in the tensor core's shorter accumulator with `use_fast_accum`, else added up in float32 every 128 terms, as
CUTLASS has it (include/cutlass/gemm/collective/fp8_accumulation.hpp, an interval of 4 instructions of 32). So results
are those of `ops/gemm` up to the order of their sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.ops._register import register_pair
from fp8_ds.ops.gemm import check_dtypes
from fp8_ds.ops.grouped import reference
from fp8_ds.ops.grouped.reference import num_columns

ALIGNMENT = 16
"""Alignment of sizes along which operands are read: the copy engine's rows begin at multiples of 16 bytes."""


def can_run(device: torch.device) -> bool:
    """Whether there are kernels for the device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (9, 0) and capability[0] != 12


def _use_triton(x: Tensor, *_: Any) -> bool:
    """Whether Triton computes it, also without elements: the reference would wait for the host."""
    return x.is_cuda


_rows = register_pair(
    "grouped_rows_by_matrices(Tensor a, Tensor b, Tensor ends, Tensor scale_inv_a, Tensor scale_inv_b, "
    "ScalarType out_dtype, bool fast) -> Tensor",
    reference.rows_by_matrices,
    lambda a, b, ends, scale_inv_a, scale_inv_b, out_dtype, fast: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
    use_triton=_use_triton,
)
_columns = register_pair(
    "grouped_columns(Tensor x, Tensor ends) -> Tensor",
    reference.columns,
    lambda x, ends: x.new_empty((x.shape[1], num_columns(x.shape[0], ends.shape[0]))),
    use_triton=_use_triton,
)
_matrices = register_pair(
    "grouped_columns_by_columns(Tensor a_t, Tensor b_t, Tensor ends, Tensor scale_inv_a, Tensor scale_inv_b, "
    "ScalarType out_dtype, bool fast) -> Tensor",
    reference.columns_by_columns,
    lambda a_t, b_t, ends, scale_inv_a, scale_inv_b, out_dtype, fast: a_t.new_empty(
        (ends.shape[0], a_t.shape[0], b_t.shape[0]), dtype=out_dtype
    ),
    use_triton=_use_triton,
)


def _check(a: Tensor, b: Tensor, ends: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> None:
    check_dtypes(a, b, out_dtype)
    if not a.is_contiguous() or not b.is_contiguous() or a.shape[-1] != b.shape[-1] or a.shape[-1] % ALIGNMENT:
        raise ValueError(
            f"a, b: expected contiguous operands with the contracted dim last, a multiple of {ALIGNMENT}, got "
            f"{tuple(a.shape)} with strides {a.stride()} and {tuple(b.shape)} with {b.stride()}. Transpose, or use a "
            "product for each group."
        )
    if any(scale_inv.dtype != torch.float32 or scale_inv.dim() != 0 for scale_inv in scales):
        raise ValueError(
            f"scale_inv_a, scale_inv_b: expected float32, 0-dim, got {[(s.dtype, tuple(s.shape)) for s in scales]}. "
            "All groups have one scale."
        )
    _check_ends(ends)


def _check_ends(ends: Tensor) -> None:
    if ends.dtype != torch.int32 or ends.dim() != 1 or not ends.is_contiguous():
        raise ValueError(
            f"ends: expected int32 [E], contiguous, got {ends.dtype} {tuple(ends.shape)}. It is the cumulative sum of "
            "the groups' rows."
        )


def rows_by_matrices(
    a_fp8: Tensor,
    b_fp8: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `(a_fp8 * scale_inv_a) @ (b_fp8 * scale_inv_b).T` of each group's rows by its matrix.

    Args:
        a_fp8: float8_e4m3fn or float8_e5m2 [P, K], contiguous, K a multiple of 16.
        b_fp8: the same [E, N, K]; at most one of the two is e5m2.
        ends: int32 [E], on the operands' device: the first row after each group, not falling, at most P.
        scale_inv_a: float32, 0-dim, multiply to leave FP8.
        scale_inv_b: the same for b.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: shorter accumulation, on CUDA only.

    Returns:
        `out_dtype` [P, N], contiguous; 0 in rows after the last group.

    Raises:
        ValueError: dtypes, shapes or layout other than these.
    """
    _check(a_fp8, b_fp8, ends, (scale_inv_a, scale_inv_b), out_dtype)
    if a_fp8.dim() != 2 or b_fp8.dim() != 3 or len(b_fp8) != len(ends):
        raise ValueError(
            f"a_fp8, b_fp8: expected [P, K] and [{len(ends)}, N, K], got {tuple(a_fp8.shape)} and "
            f"{tuple(b_fp8.shape)}. ends has a number for each matrix."
        )
    return _rows(a_fp8, b_fp8, ends, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)


def columns(x: Tensor, ends: Tensor) -> Tensor:
    """Transpose `x` so that each group begins at the next multiple of 128, with zeros after it.

    Args:
        x: any dtype of one byte, [P, C], contiguous.
        ends: as in `rows_by_matrices`.

    Returns:
        Dtype of `x`, [C, Q], contiguous; Q is that of `num_columns`, which depends on shapes alone. Columns after the
        last group's zeros are not written; rows after the last group are left out.

    Raises:
        ValueError: dtypes or layout other than these.
    """
    if x.dim() != 2 or x.element_size() != 1 or not x.is_contiguous():
        raise ValueError(
            f"x: expected a contiguous matrix of one-byte elements, got {x.dtype} {tuple(x.shape)} with strides "
            f"{x.stride()}. Call contiguous() first."
        )
    _check_ends(ends)
    return _columns(x, ends)


def columns_by_columns(
    a_fp8_t: Tensor,
    b_fp8_t: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `(a_fp8_t * scale_inv_a) @ (b_fp8_t * scale_inv_b).T` of each group's columns.

    Args:
        a_fp8_t: float8_e4m3fn or float8_e5m2 [N, Q], made by `columns` with the same `ends`.
        b_fp8_t: the same [K, Q]; at most one of the two is e5m2.
        ends: int32 [E], of rows, as given to `columns`.
        scale_inv_a: float32, 0-dim, multiply to leave FP8.
        scale_inv_b: the same for b.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: shorter accumulation, on CUDA only.

    Returns:
        `out_dtype` [E, N, K], contiguous; 0 for groups without rows.

    Raises:
        ValueError: dtypes, shapes or layout other than these.
    """
    _check(a_fp8_t, b_fp8_t, ends, (scale_inv_a, scale_inv_b), out_dtype)
    if a_fp8_t.dim() != 2 or b_fp8_t.dim() != 2:
        raise ValueError(
            f"a_fp8_t, b_fp8_t: expected [N, Q] and [K, Q], got {tuple(a_fp8_t.shape)} and {tuple(b_fp8_t.shape)}. "
            "Both are made by `columns`."
        )
    return _matrices(a_fp8_t, b_fp8_t, ends, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)
