"""RMSNorm by the Triton kernels: rows in registers, one read of x (two for tensorwise), no bf16 written unasked."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fp8_ds.ops._device import AMAX, FROM_AMAX, GIVEN, ROWWISE, runs_ptx
from fp8_ds.ops._launch import ceil_div, launch, num_processors
from fp8_ds.ops._producer import empty_output
from fp8_ds.ops.rmsnorm.kernel import rmsnorm_backward_kernel, rmsnorm_kernel, rmsnorm_rows_kernel, sum_partials_kernel
from fp8_ds.ops.rmsnorm.reference import PARTIAL_LANES, rows_per_partial

_PER_THREAD, _PER_THREAD_BACKWARD = 32, 16
_AHEAD_WARPS, _BACKWARD_WARPS = 16, 16
"""Warps on a multiprocessor, of programs that load a row ahead: with 32 elements a thread, backward 16 of two tensors,
32 KiB are on their way to it while as much is worked on (benchmarks/results/2026-11-26-kernels-trial.md and, backward,
-second.md). Rows of more than 16384, no model's, spill."""
_SUM_COLS = 8
"""Columns of a program: 16 KiB with 512 partial sums, and a program a multiprocessor from some 1000 columns on."""


def _block(num_cols: int) -> int:
    # At least what one warp takes, so that each thread has whole vectors of 16 elements.
    return max(triton.next_power_of_2(num_cols), 1024)


def _num_warps(block: int, per_thread: int) -> int:
    return min(block // (32 * per_thread), 32)


def _turns(x: Tensor, num_tasks: int, warps: int, num_warps: int) -> tuple[int, dict[str, int]]:
    """Return how many programs take turns at the tasks, and options of their launch.

    There are no more programs than tasks, nor than `warps` on each multiprocessor of the device of `x` allow; these
    share its 65536 registers, in eights for a thread.
    """
    num_programs = min(num_tasks, max(warps // num_warps, 1) * num_processors(x.device))
    registers = min(65536 // 32 // max(warps, num_warps) // 8 * 8, 255)
    return num_programs, {"num_warps": num_warps} | ({"maxnreg": registers} if runs_ptx(x) else {})


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    mode: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax_local: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Triton version of `reference.rmsnorm`."""
    num_rows, num_cols = x.shape
    x_fp8, found, hp = empty_output(x, mode, dtype)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = _block(num_cols)
    num_warps = _num_warps(block, _PER_THREAD)
    tensors = (x, weight, x_fp8.view(torch.uint8), hp, rstd)
    constants: dict[str, Any] = {"TWICE": twice, "FP8_MAX": fp8_max, "BLOCK": block}
    constants |= {"PTX": runs_ptx(x), "enable_fp_fusion": False}
    if mode == "tensorwise":
        amax = torch.zeros((), dtype=torch.float32, device=x.device)
        for kernel_mode in (AMAX, FROM_AMAX):
            launch(
                rmsnorm_kernel, num_rows, *tensors, found, amax, num_cols, x.stride(0), eps, MODE=kernel_mode,
                num_warps=num_warps, **constants,
            )  # fmt: skip
        return x_fp8, found, hp, rstd
    if mode == "given":
        assert scale_inv is not None
        found = scale_inv.clone()
    num_programs, options = _turns(x, num_rows, _AHEAD_WARPS, num_warps)
    launch(
        rmsnorm_rows_kernel,
        num_programs,
        *tensors,
        scale if mode == "given" else found,
        found,
        found if amax_local is None else amax_local,
        num_rows,
        num_cols,
        x.stride(0),
        eps,
        MODE=GIVEN if mode == "given" else ROWWISE,
        RECORD=amax_local is not None,
        **constants,
        **options,
    )
    return x_fp8, found, hp, rstd


def rmsnorm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Triton version of `reference.rmsnorm_backward`."""
    num_rows, num_cols = x.shape
    rows = rows_per_partial(num_rows, num_cols)
    num_partials = ceil_div(num_rows, rows)
    grad_x = torch.empty(num_rows, num_cols, dtype=x.dtype, device=x.device)
    partial = torch.empty(num_partials, num_cols, dtype=torch.float32, device=x.device)
    grad_weight = torch.empty(num_cols, dtype=torch.float32, device=x.device)
    block = _block(num_cols)
    num_programs, options = _turns(x, num_partials, _BACKWARD_WARPS, _num_warps(block, _PER_THREAD_BACKWARD))
    launch(
        rmsnorm_backward_kernel,
        num_programs,
        grad_output,
        x,
        weight,
        rstd,
        grad_x,
        partial,
        num_rows,
        rows,
        num_cols,
        grad_output.stride(0),
        x.stride(0),
        BLOCK=block,
        PTX=runs_ptx(x),
        enable_fp_fusion=False,
        **options,
    )
    launch(
        sum_partials_kernel,
        ceil_div(num_cols, _SUM_COLS),
        partial,
        grad_weight,
        num_partials,
        num_cols,
        STEPS=ceil_div(num_partials, PARTIAL_LANES),
        COLS=_SUM_COLS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return grad_x, grad_weight
