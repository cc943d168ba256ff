"""Product of a tensor and a number on the device, in place; where the number is 1, the tensor is not touched.

The host does not wait for the number, because the kernel reads it: a gradient of the loss, usually 1.

    x = x * factor

The product is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import register
from fp8_ds.ops.multiply import reference

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _kernel(x: Tensor, factor: Tensor) -> None:
    if x.is_cuda:
        from fp8_ds.ops.multiply import triton  # the package is missing where there is no GPU

        with torch.cuda.device_of(x):  # Triton launches on the current device
            return triton.multiply_(x, factor)
    return reference.multiply_(x, factor)


_multiply = register(
    "multiply(Tensor(a!) x, Tensor factor) -> ()",
    _kernel,
    lambda x, factor: None,
)


def takes(x: Tensor, factor: Tensor) -> bool:
    """Whether `multiply_` takes these."""
    return (
        x.dtype in _DTYPES
        and factor.dtype == torch.float32
        and factor.numel() == 1
        and factor.device == x.device
        and _is_dense(x)
    )


def multiply_(x: Tensor, factor: Tensor) -> None:
    """Multiply `x` by `factor` in place; a factor of exactly 1 leaves its bits as they were, NaNs' too.

    Autograd does not see it: the version of `x` stays, so a graph that has saved `x` returns the new values.

    Args:
        x: bf16, fp16 or fp32, any shape, dense: contiguous in some order of its dims.
        factor: float32, one element, on the same device.

    Raises:
        ValueError: arguments other than these.
    """
    if not takes(x, factor):
        raise ValueError(
            f"x, factor: expected bf16, fp16 or fp32 without gaps and one float32 on its device, got {x.dtype} "
            f"{tuple(x.shape)} with strides {x.stride()} on {x.device} and {factor.dtype} {tuple(factor.shape)} on "
            f"{factor.device}. Multiply by torch then."
        )
    _multiply(x, factor)


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()
