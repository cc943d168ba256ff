"""RMSNorm in plain torch, slow and obvious, with every sum in the order that the kernel follows."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._producer import SlotTensors, quantize_by

MIN_ROWS_PER_PARTIAL = 16
MAX_PARTIALS, MAX_PARTIAL_NUMBERS = 512, 2**20
"""Most partial sums; wide rows have fewer, so that they hold so many numbers in all (4 MiB, which are written and read
back), but as many as there are lanes."""
PARTIAL_LANES = 128


def rows_per_partial(num_rows: int, num_cols: int) -> int:
    """Number of consecutive rows whose shares of grad_weight are added in turn; a function of the shape alone."""
    width = 1 << max(num_cols - 1, 0).bit_length()
    most = min(max(MAX_PARTIAL_NUMBERS // width, PARTIAL_LANES), MAX_PARTIALS)
    return max(MIN_ROWS_PER_PARTIAL, -(-num_rows // most))


def row_sum(x: Tensor) -> Tensor:
    """Sum each row, float32 [T, C] to [T, 1]: eight neighbours as ((0+1)+(2+3))+((4+5)+(6+7)), then float64.

    The sums of eight are rounded to float32 in this order; their sum in float64 is exact, and so has no order, while
    they span less than 2**20; beyond, orders differ by 2**-50 before the one rounding to float32.
    """
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).unflatten(1, (-1, 8))
    for _ in range(3):
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(2).double().sum(dim=1, keepdim=True).float()


def _mean(x: Tensor) -> Tensor:
    # Divisors are tensors: torch on CUDA multiplies by the reciprocal of a number.
    return row_sum(x) / torch.full((x.shape[0], 1), float(x.shape[1]), dtype=torch.float32, device=x.device)


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """Compute `1 / sqrt(mean(x**2) + eps)` of each row, float32 [T]; root and quotient are correctly rounded."""
    wide = x.float()
    # In float64: torch's float32 root is not correctly rounded on CPU.
    root = (_mean(wide * wide) + eps).double().sqrt().float()
    return (torch.ones_like(root) / root).squeeze(1)


def normalize(x: Tensor, weight: Tensor, rstd: Tensor, twice: bool) -> Tensor:
    """Compute bf16 [T, C], `x * rstd * weight`, rounded at the end, or also before the weight."""
    normed = x.float() * rstd[:, None]
    if twice:
        normed = normed.bfloat16().float()
    return (normed * weight.float()).bfloat16()


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
    """Return (x_fp8, scale_inv, hp, rstd)."""
    rstd = rstd_of(x, eps)
    hp = normalize(x, weight, rstd, twice)
    return *quantize_by(hp, mode, SlotTensors(scale, scale_inv, amax_local), dtype, fp8_max), hp, rstd


def rmsnorm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_x, grad_weight)."""
    normed = x.float() * rstd[:, None]
    grad = grad_output.float()
    grad_normed = grad * weight.float()
    grad_x = (grad_normed - normed * _mean(grad_normed * normed)) * rstd[:, None]
    return grad_x.bfloat16(), sum_rows(grad * normed)


def sum_rows(x: Tensor) -> Tensor:
    """Sum all rows, float32 [T, C] to [C]: `partial_sums`, then `sum_partials`."""
    return sum_partials(partial_sums(x))


def partial_sums(x: Tensor) -> Tensor:
    """Add `rows_per_partial` rows one after another from zero in float32, [T, C] to [P, C]."""
    rows = rows_per_partial(*x.shape)
    return _sum_in_order(_pad_rows(x, rows).unflatten(0, (-1, rows)).transpose(0, 1))


def sum_partials(partial: Tensor) -> Tensor:
    """Sum [P, C] to [C]: lane i of 128 adds partials i, i + 128, ... in float32; lanes in float64, as in `row_sum`."""
    lanes = _sum_in_order(_pad_rows(partial, PARTIAL_LANES).unflatten(0, (-1, PARTIAL_LANES)))
    return lanes.double().sum(dim=0).float()


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % multiple))


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum over dim 0, one after another from zero."""
    total = x.new_zeros(x.shape[1:])
    for row in x:
        total = total + row
    return total
