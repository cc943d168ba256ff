"""The shift in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops.transpose import reference


def shift_transpose(x_fp8: Tensor, ratio: Tensor) -> Tensor:
    """Codes times `ratio`, float32 [T], a power of two each, to nearest even; transposed."""
    # FP8 codes and their products with powers of two are exact in bf16, as far down as an FP8 code can be told from 0.
    shifted = x_fp8.to(torch.bfloat16) * ratio.to(torch.bfloat16)[:, None]
    return reference.transpose(shifted.to(x_fp8.dtype))
