"""Transpose of one-byte matrices: Hopper's FP8 GEMM takes operands only with the contracted dim last."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import register_pair


def transpose_reference(x: Tensor) -> Tensor:
    """Copy the transpose, even of one row, which is contiguous already: an op's result is never its input."""
    # As integers: a copy moves bytes, whatever floats they are.
    return x.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).view(x.dtype)


_transpose = register_pair("transpose(Tensor x) -> Tensor", transpose_reference, lambda x: x.new_empty(x.mT.shape))


def transpose(x: Tensor) -> Tensor:
    """Return a contiguous `x.mT`, bit for bit: NaNs keep their payloads.

    Args:
        x: any dtype of one byte, [R, C] or matrices [E, R, C], contiguous. Sides that are multiples of 16 are moved 16
            bytes at a time.

    Returns:
        Tensor of the dtype of `x`, [C, R] or [E, C, R], contiguous, in memory of its own.

    Raises:
        ValueError: dtype, number of dims or layout other than these.
    """
    # Not by a method: in a backward Dynamo takes that for a question about a gradient, and traces all of it once more.
    if x.dim() not in (2, 3) or x.element_size() != 1 or not torch.Tensor.is_contiguous(x):
        raise ValueError(
            f"x: expected contiguous matrices of one-byte elements, got {x.dtype} {tuple(x.shape)} with strides "
            f"{x.stride()}. A transposed view needs no transpose."
        )
    return _transpose(x)
