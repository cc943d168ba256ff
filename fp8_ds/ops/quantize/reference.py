"""Quantisation in plain torch, slow and obvious: the reference of the kernels, also used on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8_ds.numerics.scale import pow2_scale, row_scale_from_amax, scale_from_amax
from fp8_ds.ops.transpose import transpose_reference

_CHUNK = 1 << 24
"""Elements of a part quantised at a time: bounds the fp32 temporary to 64 MiB."""


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, float32, 0-dim; 0 for an empty tensor; NaN if there is a NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # aminmax reads x once and, unlike abs().max(), makes no copy of it; it propagates NaN.
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(torch.float32)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """Compute `cast(clamp(x * scale))`, product in float32, cast to nearest even; NaN stays NaN, infinity saturates."""
    # The clamp comes first: past the range, casts of torch give NaN, infinity or the maximum, by version and device.
    return (x.to(torch.float32) * scale).clamp_(-fp8_max, fp8_max).to(dtype)


def quantize_part(
    x: Tensor, grid: Tensor, start: int, num_cols: int, block_rows: int, block_cols: int, dtype: torch.dtype,
    fp8_max: float,
) -> Tensor:  # fmt: skip
    """Quantize elements `start` and on of a flattened matrix by a grid of scales, one for each block."""
    at = torch.arange(start, start + x.numel(), device=x.device)
    scale = grid[at // num_cols // block_rows, at % num_cols // block_cols]
    return quantize(x, scale, dtype, fp8_max)


def quantize_parts(
    table: Tensor,
    program_parts: Tensor,
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    grids: Sequence[Tensor],
    places: Sequence[int],
    has_one_scale: bool,
    is_vector: bool,
    fp8_max: float,
) -> None:
    """Quantize each of `xs` into its `outs`, by `quantize` where its grid is 0-dim, else by `quantize_part`.

    Args:
        table, program_parts, has_one_scale, is_vector: for the kernel, see multi_tensor.py.
        places: start, num_cols, block_rows and block_cols of each.
    """
    for k, (x, out, grid) in enumerate(zip(xs, outs, grids, strict=True)):
        start, num_cols, block_rows, block_cols = places[4 * k : 4 * k + 4]
        for source, target in zip(x.split(_CHUNK), out.split(_CHUNK), strict=True):
            if grid.dim() == 0:
                target.copy_(quantize(source, grid, out.dtype, fp8_max))
            else:
                part = quantize_part(source, grid, start, num_cols, block_rows, block_cols, out.dtype, fp8_max)
                target.copy_(part)
            start += source.numel()


def quantize_tensorwise(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    scale, scale_inv = scale_from_amax(amax(x), fp8_max)
    return quantize(x, scale, dtype, fp8_max), scale_inv


def quantize_tensor_pow2(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    scale, scale_inv = pow2_scale(amax(x), fp8_max)
    return quantize(x, scale, dtype, fp8_max), scale_inv


def quantize_delayed(
    x: Tensor, scale: Tensor, scale_inv: Tensor, amax_local: Tensor, record: bool, dtype: torch.dtype, fp8_max: float
) -> tuple[Tensor, Tensor]:
    measured = amax(x)
    if record:
        record_amax(measured, amax_local)
    # A scale of the past saturates an infinity of today: the poison keeps it visible.
    poisoned = torch.where(torch.isfinite(measured), scale_inv, torch.full_like(scale_inv, float("nan")))
    return quantize(x, scale, dtype, fp8_max), poisoned


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    amax_local.copy_(torch.maximum(amax_local, amax(x)))


def _in_layout(x_fp8: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return (plain, transposed), empty where not asked for; neither shares memory with the other."""
    none = x_fp8.new_empty(0)
    return none if layout == "col" else x_fp8, none if layout == "row" else transpose_reference(x_fp8)


def quantize_and_transpose_tensorwise(
    x: Tensor, dtype: torch.dtype, fp8_max: float, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    x_fp8, scale_inv = quantize_tensorwise(x, dtype, fp8_max)
    return (*_in_layout(x_fp8, layout), scale_inv)


def quantize_and_transpose_delayed(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    amax_local: Tensor,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    x_fp8, scale_inv = quantize_delayed(x, scale, scale_inv, amax_local, record, dtype, fp8_max)
    return (*_in_layout(x_fp8, layout), scale_inv)


def quantize_rowwise(x: Tensor, fold: Tensor | None, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return (x_fp8 [T, C], scale_inv [T, 1]), one scale a row; `fold` [C] or [C, 1] is multiplied in first."""
    folded = x.to(torch.float32) if fold is None else x.to(torch.float32) * fold.reshape(-1)
    amaxes = folded.new_zeros(len(x)) if x.numel() == 0 else folded.abs().amax(dim=1)
    scale, scale_inv = row_scale_from_amax(amaxes[:, None], fp8_max)
    return quantize(folded, scale, dtype, fp8_max), scale_inv


def quantize_colwise_t(x: Tensor, fold: Tensor | None, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return (x_fp8_t [C, T], scale_inv [C, 1]), one scale a column; `fold` [T] or [T, 1] is multiplied in first."""
    x_fp8_t, scale_inv = quantize_rowwise(x.t(), fold, dtype, fp8_max)
    return x_fp8_t.contiguous(), scale_inv
