"""Alignment of FP8 codes: rows with a scale each become columns that share one, by shifts by powers of two.

A GEMM that contracts over tokens cannot apply a scale that varies from token to token. Where scales are powers of two,
codes can take the largest of them instead: exactly where the shifted code is normal, to nearest even where it becomes
subnormal, which lies as far below the largest code as it would had the whole matrix been quantised by that scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import register_pair
from fp8_ds.ops.transpose import transpose_reference

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def align_reference(x_fp8: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    if x_fp8.numel() == 0:
        return transpose_reference(x_fp8), scale_inv.new_ones(())
    ratio, largest = ratios(scale_inv)
    return shift_transpose(x_fp8, ratio), largest


def ratios(scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Return (each scale of [k] over the largest, the largest); the ratio is 0 where the largest is."""
    largest = scale_inv.amax()
    return torch.where(largest == 0, torch.zeros_like(scale_inv), scale_inv / largest), largest


def shift_transpose(x_fp8: Tensor, ratio: Tensor) -> Tensor:
    """Multiply codes [T, C] by `ratio`, float32 [k], a power of two for T / k rows each, to nearest even; transpose."""
    ratio = ratio.repeat_interleave(x_fp8.shape[0] // len(ratio))
    # FP8 codes and their products with powers of two are exact in bf16, as far down as an FP8 code can be told from 0.
    shifted = x_fp8.to(torch.bfloat16) * ratio.to(torch.bfloat16)[:, None]
    return transpose_reference(shifted.to(x_fp8.dtype))


_align = register_pair(
    "align(Tensor x_fp8, Tensor scale_inv) -> (Tensor, Tensor)",
    align_reference,
    lambda x_fp8, scale_inv: (x_fp8.new_empty((x_fp8.shape[1], x_fp8.shape[0])), scale_inv.new_empty(())),
)


def align(x_fp8: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose `x_fp8` and give all of it one scale, the largest of its rows'.

    Args:
        x_fp8: float8_e4m3fn or float8_e5m2 [T, C], contiguous.
        scale_inv: float32 [T], or [k] with one for T / k rows each, as ranks have; powers of two, multiply to leave
            FP8; rows that are all zeros may have 0. NaN makes the result NaN.

    Returns:
        (x_fp8_t, scale_inv): [C, T], contiguous; float32, 0-dim.

    Raises:
        ValueError: dtypes, shapes or layout other than these.
    """
    if x_fp8.dtype not in _FP8_DTYPES or x_fp8.dim() != 2 or not x_fp8.is_contiguous():
        raise ValueError(
            f"x_fp8: expected a contiguous matrix in FP8, got {x_fp8.dtype} {tuple(x_fp8.shape)} with strides "
            f"{x_fp8.stride()}. Quantise it first."
        )
    num_rows, is_vector = x_fp8.shape[0], scale_inv.dtype == torch.float32 and scale_inv.dim() == 1
    if not is_vector or (num_rows and num_rows % max(1, scale_inv.shape[0])):
        raise ValueError(
            f"scale_inv: expected float32 ({num_rows},), or fewer that divide {num_rows} rows, got {scale_inv.dtype} "
            f"{tuple(scale_inv.shape)}. Pass one for each row, or for each rank's."
        )
    return _align(x_fp8, scale_inv)
