"""Operands that travel, quantised by powers of two (scaling/pow2.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops.blockwise import block_amax
from fp8_ds.ops.quantize import quantize_part
from fp8_ds.scaling.pow2 import pow2_scale


def quantize_rows_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by a power of two for each row: two reads of `x`.

    Args:
        x: bf16, fp16 or fp32, contiguous [T, C].
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8 [T, C], scale_inv float32 [T, 1]).
    """
    if x.numel() == 0:
        return x.to(fmt.torch_dtype), x.new_ones((x.shape[0], 1), dtype=torch.float32)
    amax = block_amax(x, (1, 128)).amax(1, keepdim=True)
    scale, scale_inv = pow2_scale(amax, fmt.max)
    x_fp8 = quantize_part(x.view(-1), scale, 0, x.shape[1], (1, x.shape[1]), fmt)
    return x_fp8.view(x.shape), scale_inv
