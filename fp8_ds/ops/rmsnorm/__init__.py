"""RMSNorm straight into FP8, and its backward.

bf16 results are those of the module that is replaced (up to the last bit of rstd, whose sum has another order there),
and FP8 results are those bf16 values quantised as in ops/quantize: fusing changes no other number.

`rounding="once"`: `x * rstd * weight` in float32, rounded at the end: torch.nn.RMSNorm (torch 2.13
`torch/_decomp/decompositions.py`, `_fused_rms_norm`; CUDA `layer_norm_kernel.cu`). `rounding="twice"`: the normed value
is rounded to bf16 before the weight: transformers 5 `LlamaRMSNorm.forward` (which, if the weight is float32, returns
float32; here that is rounded to bf16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops._producer import (
    Fp8Output,
    Rounding,
    Scaling,
    SlotTensors,
    check_rows,
    empty_output,
    is_twice,
    mode_of,
    takes_kernel,
)
from fp8_ds.ops._register import register
from fp8_ds.ops.rmsnorm import reference

__all__ = ["MAX_COLS", "Fp8Output", "rmsnorm", "rmsnorm_backward"]

MAX_COLS = 32768
"""A row stays in the registers of one program: 32 elements for each of its 1024 threads."""

_KEEP: list[torch.library.Library] = []
"""Library handles; the ops live as long as these."""


def _kernel(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax_local: Tensor | None,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
    with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slot = SlotTensors(scale, scale_inv, amax_local)
    if takes_kernel(x):
        from fp8_ds.ops.rmsnorm import triton  # the package is missing where there is no GPU

        return triton.rmsnorm(x, weight, eps, scaling, slot, record, dtype, fp8_max, twice, with_hp)
    x_fp8, out_scale_inv, rstd, hp = reference.rmsnorm(x, weight, eps, scaling, slot, record, dtype, fp8_max, twice)
    return x_fp8, out_scale_inv, rstd, hp if with_hp else hp.new_empty(0)


def _fake(
    x: Tensor, weight: Tensor, eps: float, scaling: str, scale: Any, scale_inv: Any, amax_local: Any, record: bool,
    dtype: torch.dtype, fp8_max: float, twice: bool, with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_fp8, out_scale_inv, hp = empty_output(x.shape[0], x.shape[1], scaling, dtype, with_hp, x)
    return x_fp8, out_scale_inv, x.new_empty(x.shape[0], dtype=torch.float32), hp


def _backward_kernel(
    grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    if takes_kernel(x):
        from fp8_ds.ops.rmsnorm import triton

        return triton.rmsnorm_backward(grad_output, x, weight, rstd, grad_residual)
    return reference.rmsnorm_backward(grad_output, x, weight, rstd, grad_residual)


def _backward_fake(
    grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


_rmsnorm, _handle = register(
    "rmsnorm(Tensor x, Tensor weight, float eps, str scaling, Tensor? scale, Tensor? scale_inv, "
    "Tensor(a!)? amax_local, bool record, ScalarType dtype, float fp8_max, bool twice, bool with_hp) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
)
_KEEP.append(_handle)
_rmsnorm_backward, _handle = register(
    "rmsnorm_backward(Tensor grad_output, Tensor x, Tensor weight, Tensor rstd, Tensor? grad_residual) -> "
    "(Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_KEEP.append(_handle)


def _check(x: Tensor, weight: Tensor) -> None:
    check_rows("x", x)
    if not 0 < x.shape[1] <= MAX_COLS:
        raise ValueError(f"x: expected 1 to {MAX_COLS} columns, got {x.shape[1]}. Norm wider rows with torch.")
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"weight: expected bfloat16 or float32 [{x.shape[1]}], contiguous, got {weight.dtype} "
            f"{tuple(weight.shape)} with strides {weight.stride()}. Pass the norm's weight."
        )


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Float8Format,
    scaling: Scaling,
    *,
    record: bool = True,
    rounding: Rounding = "once",
    with_hp: bool = False,
) -> tuple[Fp8Output, Tensor]:
    """`x / sqrt(mean(x**2) + eps) * weight` in FP8, and in bf16 too if `with_hp`.

    Args:
        x: bf16 [T, C], rows without gaps, any stride between them.
        weight: bf16 or float32 [C].
        eps: added to the mean of the squares, in float32.
        fmt: E4M3 or E5M2.
        scaling: see `Scaling`.
        record: with a slot: whether its amax_local takes the maximum (training), or is left (evaluation).
        rounding: see the module's text.
        with_hp: whether the bf16 values are written too.

    Returns:
        (output, rstd): `Fp8Output`, and float32 [T], what backward needs. The order of the sum: `reference.row_sum`.

    Raises:
        ValueError: another dtype, shape, layout, format, scaling or rounding.
    """
    _check(x, weight)
    mode, slot = mode_of(scaling)
    dtype, twice = fmt.torch_dtype, is_twice(rounding)
    x_fp8, scale_inv, rstd, hp = _rmsnorm(x, weight, eps, mode, *slot, record, dtype, fmt.max, twice, with_hp)
    return Fp8Output(x_fp8, scale_inv, hp if with_hp else None), rstd


def rmsnorm_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rmsnorm` in float32 arithmetic, roundings of forward passed over; the same bits in every run.

    Args:
        grad_output: bf16 [T, C], rows without gaps.
        x: as in forward.
        weight: as in forward.
        rstd: float32 [T] from forward.
        grad_residual: bf16 [T, C], rows without gaps, or None: gradient that reached x past the norm, added to grad_x
            before its one rounding.

    Returns:
        (grad_x, grad_weight): bf16 [T, C], contiguous; float32 [C], its order of summation: `reference.sum_rows`.
    """
    _check(x, weight)
    check_rows("grad_output", grad_output, x)
    if grad_residual is not None:
        check_rows("grad_residual", grad_residual, x)
    if rstd.dtype != torch.float32 or rstd.shape != x.shape[:1] or not rstd.is_contiguous():
        raise ValueError(
            f"rstd: expected float32 [{x.shape[0]}], got {rstd.dtype} {tuple(rstd.shape)}. Keep forward's."
        )
    grads: tuple[Tensor, Tensor] = _rmsnorm_backward(grad_output, x, weight, rstd, grad_residual)
    return grads
