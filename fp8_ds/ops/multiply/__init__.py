"""A tensor times a number that lies on the device, in place; no byte of it is touched where the number is 1.

Nobody waits for the number, which the programs of the launch look at: a gradient of the loss, 1 as a rule.

    x = x * factor

In float32, rounded once.
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
    """Whether `multiply_` takes them."""
    return (
        x.dtype in _DTYPES
        and factor.dtype == torch.float32
        and factor.numel() == 1
        and factor.device == x.device
        and _is_dense(x)
    )


def multiply_(x: Tensor, factor: Tensor) -> None:
    """`x` is `x * factor`; with a factor of exactly 1 its bits are as they were, NaNs' too.

    Autograd does not see it: its version is what it was, and a graph that has saved it gives it out.

    Args:
        x: bf16, fp16 or fp32, any shape, dense: contiguous in some order of its dims.
        factor: float32, one element, on the same device.

    Raises:
        ValueError: others than these.
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
