"""RMSNorm straight into FP8, and its backward.

bf16 results are those of the module that is replaced (up to the last bit of rstd, whose sum has another order there),
and FP8 results are those bf16 values quantised as in ops/quantize: fusing changes no other number.

`rounding="once"` computes `x * rstd * weight` in float32 and rounds at the end: torch.nn.RMSNorm (torch 2.13
`torch/_decomp/decompositions.py`, `_fused_rms_norm`; CUDA `layer_norm_kernel.cu`). `rounding="twice"` rounds the normed
value to bf16 before the weight: transformers 5 `LlamaRMSNorm.forward` (which, if the weight is float32, returns
float32; here that is rounded to bf16).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8_ds.numerics.formats import Float8Format
from fp8_ds.ops._producer import Fp8Output, Scaling, check_rows, empty_output, mode_of
from fp8_ds.ops._register import register_pair
from fp8_ds.ops.rmsnorm import reference

MAX_COLS = 32768
"""Most columns: a row stays in the registers of one program, 32 elements for each of its 1024 threads."""

Rounding = Literal["once", "twice"]
"""Rounding of the bf16 module that the op replaces; see the module's text."""

_rmsnorm = register_pair(
    "rmsnorm(Tensor x, Tensor weight, float eps, str scaling, Tensor? scale, Tensor? scale_inv, "
    "Tensor(a!)? amax_local, ScalarType dtype, float fp8_max, bool twice) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.rmsnorm,
    lambda x, weight, eps, scaling, scale, scale_inv, amax_local, dtype, fp8_max, twice: (
        *empty_output(x, scaling, dtype),
        x.new_empty(x.shape[0], dtype=torch.float32),
    ),
)
_rmsnorm_backward = register_pair(
    "rmsnorm_backward(Tensor grad_output, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    reference.rmsnorm_backward,
    lambda grad_output, x, weight, rstd: (x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)),
)


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
) -> tuple[Fp8Output, Tensor]:
    """Compute `x / sqrt(mean(x**2) + eps) * weight` in FP8 and in bf16.

    Args:
        x: bf16 [T, C], rows without gaps, any stride between them.
        weight: bf16 or float32 [C].
        eps: added to the mean of the squares, in float32.
        fmt: E4M3 or E5M2.
        scaling: see `Scaling`.
        record: with a slot: whether its amax_local takes the maximum (training), or is left (evaluation).
        rounding: see the module's text.

    Returns:
        (output, rstd): `Fp8Output`, and float32 [T], what backward needs. The order of the sum: `reference.row_sum`.

    Raises:
        ValueError: another dtype, shape, layout, format, scaling or rounding.
    """
    _check(x, weight)
    if rounding not in ("once", "twice"):
        raise ValueError(f"rounding: expected 'once' or 'twice', got {rounding!r}. Use one of these.")
    mode, slot = mode_of(scaling, record)
    *output, rstd = _rmsnorm(x, weight, eps, mode, *slot, fmt.torch_dtype, fmt.max, rounding == "twice")
    return Fp8Output(*output), rstd


def rmsnorm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rmsnorm` in float32, ignoring the forward's roundings; the same bits in every run.

    Args:
        grad_output: bf16 [T, C], rows without gaps.
        x: as in forward.
        weight: as in forward.
        rstd: float32 [T] from forward.

    Returns:
        (grad_x, grad_weight): bf16 [T, C], contiguous; float32 [C], its order of summation: `reference.sum_rows`.
    """
    _check(x, weight)
    check_rows("grad_output", grad_output, x)
    if rstd.dtype != torch.float32 or rstd.shape != x.shape[:1] or not rstd.is_contiguous():
        raise ValueError(
            f"rstd: expected float32 [{x.shape[0]}], got {rstd.dtype} {tuple(rstd.shape)}. Keep forward's."
        )
    return _rmsnorm_backward(grad_output, x, weight, rstd)
