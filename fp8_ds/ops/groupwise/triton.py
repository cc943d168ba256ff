"""De-quantisation by groups by the Triton kernel, one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops.blockwise import num_blocks
from fp8_ds.ops.blockwise.reference import BLOCK
from fp8_ds.ops.groupwise.kernel import dequantize_kernel

_ROWS, _NUM_WARPS = 32, 4
"""32 elements a thread: two vectors of 16 codes."""


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """As `reference.dequantize_groupwise`; on CUDA, or on CPU under Triton's interpreter."""
    num_rows, num_cols = x_fp8.shape
    x = torch.empty_like(x_fp8, dtype=torch.bfloat16)
    launch(
        dequantize_kernel,
        ceil_div(num_rows, _ROWS) * num_blocks(num_cols),
        x_fp8.view(torch.uint8),
        scale_inv,
        scale_inv.stride(0),
        scale_inv.stride(1),
        x,
        num_rows,
        num_cols,
        ROWS=_ROWS,
        EVEN=num_rows % _ROWS == 0 and num_cols % BLOCK == 0,
        PTX=x.is_cuda and torch.version.hip is None,
        num_warps=_NUM_WARPS,
    )
    return x
