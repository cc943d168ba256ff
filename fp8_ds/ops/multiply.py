"""Product of a tensor and a number on the device, in place; where the number is 1, the tensor is not touched.

The host does not wait for the number, because the kernel reads it: a gradient of the loss, usually 1.

    x = x * factor

The product is computed in float32 and rounded once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import HAS_TRITON, register

BLOCK, NUM_WARPS = 8192, 8
"""Elements that a program has in flight, 32 a thread, and its warps."""
_PROGRAMS = 4
"""Programs for each multiprocessor: they fill the device and take blocks in turn."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from fp8_ds.ops._launch import ceil_div, num_processors

    @triton.jit
    def multiply_kernel(x, factor, numel, BLOCK: tl.constexpr):
        """Multiply elements in the order of memory."""
        by = tl.load(factor)
        if by != 1.0:
            start = tl.program_id(0).to(tl.int64) * BLOCK
            while start < numel:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
                at = start + tl.arange(0, BLOCK)
                value = tl.load(x + at, at < numel).to(tl.float32)
                tl.store(x + at, (value * by).to(x.dtype.element_ty), at < numel)
                start += tl.num_programs(0).to(tl.int64) * BLOCK


def multiply_reference(x: Tensor, factor: Tensor) -> None:
    """Multiply in place. Reads the factor back."""
    if float(factor) != 1:
        x.data.copy_(x.to(torch.float32) * factor.reshape(()))  # `data`: the version stays, as with a kernel


def multiply_by_kernel(x: Tensor, factor: Tensor) -> None:
    """Multiply in place without reading the factor back; on CPU only under Triton's interpreter."""
    num_programs = min(ceil_div(x.numel(), BLOCK), _PROGRAMS * num_processors(x.device))
    if num_programs:
        multiply_kernel[(num_programs,)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)


def _multiply_on_device(x: Tensor, factor: Tensor) -> None:
    if not (x.is_cuda and HAS_TRITON):
        return multiply_reference(x, factor)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return multiply_by_kernel(x, factor)


_multiply = register("multiply(Tensor(a!) x, Tensor factor) -> ()", _multiply_on_device, lambda x, factor: None)


def can_multiply(x: Tensor, factor: Tensor) -> bool:
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
    if not can_multiply(x, factor):
        raise ValueError(
            f"x, factor: expected bf16, fp16 or fp32 without gaps and one float32 on its device, got {x.dtype} "
            f"{tuple(x.shape)} with strides {x.stride()} on {x.device} and {factor.dtype} {tuple(factor.shape)} on "
            f"{factor.device}. Multiply by torch then."
        )
    _multiply(x, factor)


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()
