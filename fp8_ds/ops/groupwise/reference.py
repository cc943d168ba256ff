"""Dequantisation by groups in plain torch: the reference of the kernel, also used on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops.blockwise.reference import BLOCK


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    per_element = scale_inv.repeat_interleave(BLOCK, 1)[:, : x_fp8.shape[1]]
    return (x_fp8.to(torch.float32) * per_element).to(torch.bfloat16)
