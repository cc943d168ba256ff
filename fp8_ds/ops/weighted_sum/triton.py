"""Triton kernels with a program for each token, which holds one of its rows, or its gradient, in registers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._launch import launch

_ELEMENTS_A_WARP = 512
"""Elements a warp takes: two loads of 16 bytes a thread, of bf16."""


@triton.jit
def weighted_sum_kernel(rows, place, weights, out, num_cols, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of one token. NUM: its number of rows. BLOCK: a power of two, at least `num_cols`."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < num_cols
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(NUM):
        row = tl.load(place + token * NUM + j)
        weight = tl.load(weights + token * NUM + j).to(tl.float32)
        total += weight * tl.load(rows + row * num_cols + col, inside, 0.0).to(tl.float32)
    tl.store(out + token * num_cols + col, total.to(out.dtype.element_ty), inside)


@triton.jit
def weighted_sum_backward_kernel(
    grad, rows, place, weights, grad_rows, grad_weights, num_cols, NUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one token's gradients; NUM and BLOCK are as in `weighted_sum_kernel`."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < num_cols
    given = tl.load(grad + token * num_cols + col, inside, 0.0).to(tl.float32)
    for j in tl.static_range(NUM):
        row = tl.load(place + token * NUM + j)
        weight = tl.load(weights + token * NUM + j).to(tl.float32)
        value = tl.load(rows + row * num_cols + col, inside, 0.0).to(tl.float32)
        tl.store(grad_rows + row * num_cols + col, (weight * given).to(grad_rows.dtype.element_ty), inside)
        tl.store(grad_weights + token * NUM + j, tl.sum(given * value).to(grad_weights.dtype.element_ty))


def weighted_sum(rows: Tensor, place: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Triton version of `weighted_sum_reference`, for at least one row; on CPU only under Triton's interpreter."""
    (num_tokens, num_choices), num_cols = weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, num_cols, dtype=out_dtype, device=rows.device)
    options = _options(num_choices, num_cols)
    launch(weighted_sum_kernel, num_tokens, rows, place, weights, out, num_cols, **options)
    return out


def weighted_sum_backward(grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Triton version of `weighted_sum_backward_reference`, for at least one row; sums over features differ in order."""
    (num_tokens, num_choices), num_cols = weights.shape, rows.shape[1]
    grads = torch.empty_like(rows), torch.empty_like(weights)
    options = _options(num_choices, num_cols)
    launch(weighted_sum_backward_kernel, num_tokens, grad, rows, place, weights, *grads, num_cols, **options)
    return grads


def _options(num_choices: int, num_cols: int) -> dict[str, Any]:
    block = triton.next_power_of_2(num_cols)
    num_warps = min(max(block // _ELEMENTS_A_WARP, 1), 16)
    return {"NUM": num_choices, "BLOCK": block, "num_warps": num_warps, "enable_fp_fusion": False}
