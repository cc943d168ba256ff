"""Split masters as numbers, in one read of theirs and one write. The reference is `numerics.masters.decode`.

Torch's operators move some 94 bytes an element where 4 are needed: at the rate of a copy on an H200 40 ms a step
of 2 B parameters whose layers are in bf16 (docs/speed.md, "Its last steps in bf16").
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.masters import MasterFormat, decode

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def decode_master(hi: Tensor, lo: Tensor, fmt: MasterFormat, scale_inv: Tensor | None, out: Tensor) -> None:
    """Write the masters into `out`, rounded to its dtype.

    Args:
        hi, lo: `fmt.hi_dtype` and `fmt.lo_dtype` [n], as `numerics.masters.encode` gives them.
        fmt: a split format.
        scale_inv: float32, 0-dim, multiply to leave FP8; None where `fmt` is not FP8.
        out: float [n], on any device.

    Raises:
        ValueError: the tensors differ in size.
    """
    if not hi.numel() == lo.numel() == out.numel():
        raise ValueError(
            f"out: expected {hi.numel()} elements, as many as both parts have, got {lo.numel()} low parts and "
            f"{out.numel()} to write. Cut them alike."
        )
    tensors = (hi, lo, out) if scale_inv is None else (hi, lo, out, scale_inv)
    is_dense = all(x.is_cuda and x.device == out.device and x.is_contiguous() for x in tensors)
    if not is_dense or out.dtype not in _KERNEL_DTYPES:
        out.copy_(decode(hi, lo, fmt, scale_inv))
    elif out.numel():
        from fp8_ds.ops.decode_master import triton  # the package is missing where there is no GPU

        with torch.cuda.device_of(out):  # Triton launches on the current device
            triton.decode_master(hi, lo, fmt, scale_inv, out)
