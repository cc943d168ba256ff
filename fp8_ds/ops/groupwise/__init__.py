"""Storage in E4M3 by groups of 128 along the rows of a matrix, one power-of-two scale each, and the way back to bf16.

It is for tensors that wait between forward and backward and are multiplied by nothing (COAT, arXiv 2410.19313, section
4). COAT's groups have 16 elements and bf16 scales; with powers of two the way back is exact: bf16 holds every code
times its scale while the product is normal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._register import register_pair
from fp8_ds.ops.blockwise import BLOCK, num_blocks, quantize_blockwise
from fp8_ds.ops.groupwise import reference

__all__ = ["GROUP", "check_groups", "dequantize_groupwise", "quantize_groupwise"]

GROUP = BLOCK
"""Elements that share a scale."""


_dequantize = register_pair(
    "dequantize_groupwise(Tensor x_fp8, Tensor scale_inv) -> Tensor",
    reference,
    lambda x_fp8, scale_inv: torch.empty_like(x_fp8, dtype=torch.bfloat16),
)


def quantize_groupwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `x` to E4M3, each group of 128 in a row by the largest power of two its amax allows; one read of `x`.

    Args:
        x: bf16, fp16 or fp32 [T, C].

    Returns:
        (x_fp8, scale_inv): float8_e4m3fn [T, C], contiguous; float32 [T, ceil(C / 128)], strides (1, T), multiply to
        leave FP8, NaN for a group that holds a NaN or an infinity. 1.03 bytes an element.
    """
    planes = quantize_blockwise(x, E4M3, (1, GROUP), "row")
    assert planes.x_fp8 is not None and planes.scale_inv is not None
    return planes.x_fp8, planes.scale_inv


def check_groups(name: str, x_fp8: Tensor, scale_inv: Tensor) -> None:
    """Refuse all but what `quantize_groupwise` returns."""
    if x_fp8.dtype != E4M3.dtype or x_fp8.dim() != 2 or not x_fp8.is_contiguous():
        raise ValueError(
            f"{name}: expected float8_e4m3fn [T, C], contiguous, got {x_fp8.dtype} {tuple(x_fp8.shape)} with strides "
            f"{x_fp8.stride()}. Pass what quantize_groupwise gave."
        )
    expected = (x_fp8.shape[0], num_blocks(x_fp8.shape[1]))
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv: expected float32 {expected}, got {scale_inv.dtype} {tuple(scale_inv.shape)}. Pass what "
            "quantize_groupwise gave."
        )


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantize by groups: `x_fp8 * scale_inv`, rounded to bf16 (exact for normal numbers of bf16).

    Args:
        x_fp8: float8_e4m3fn [T, C], contiguous.
        scale_inv: float32 [T, ceil(C / 128)], any strides.

    Returns:
        bf16 [T, C], contiguous.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    check_groups("x_fp8", x_fp8, scale_inv)
    x: Tensor = _dequantize(x_fp8, scale_inv)
    return x
