"""Reference of the FP8 GEMM: dequantize, multiply in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_mm(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute `(a * scale_inv_a) @ (b * scale_inv_b).T`, all of it in float32, then cast once to `out_dtype`."""
    # On CUDA, TF32 must be off (torch's default) for this to be a reference.
    a_hp = a.to(torch.float32) * scale_inv_a
    b_hp = b.to(torch.float32) * scale_inv_b
    return (a_hp @ b_hp.t()).to(out_dtype)
