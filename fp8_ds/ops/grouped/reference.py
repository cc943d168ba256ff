"""Reference of the grouped products: one group after another, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

GROUP_BLOCK = 128
"""Columns of a group start at a multiple of this, with zeros after them: a tile along which a product contracts belongs
to one group, and has no mask."""


def num_columns(num_rows: int, num_groups: int) -> int:
    """Return Q, the most columns that groups of altogether `num_rows` rows need, whichever row is whose."""
    most = num_rows + (GROUP_BLOCK - 1) * min(num_groups, num_rows)
    return most // GROUP_BLOCK * GROUP_BLOCK if num_groups else 0


def _rows(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(ends.tolist()):
        yield group, slice(start, end)
        start = end


def rows_by_matrices(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Return [P, N]."""
    # On CUDA, TF32 must be off (torch's default) for this to be a reference.
    output = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for group, rows in _rows(ends):
        output[rows] = a[rows].to(torch.float32) @ b[group].to(torch.float32).t()
    return (output * (scale_inv_a * scale_inv_b)).to(out_dtype)


def columns(x: Tensor, ends: Tensor) -> Tensor:
    """Return [C, Q], zeros where no row is."""
    out_t = torch.zeros(x.shape[1], num_columns(x.shape[0], len(ends)), dtype=torch.uint8, device=x.device)
    first = 0
    for _, rows in _rows(ends):
        size = rows.stop - rows.start
        out_t[:, first : first + size] = x[rows].view(torch.uint8).t()
        first += -(-size // GROUP_BLOCK) * GROUP_BLOCK
    return out_t.view(x.dtype)


def columns_by_columns(
    a_t: Tensor,
    b_t: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Return [E, N, K]."""
    output = torch.zeros(len(ends), a_t.shape[0], b_t.shape[0], dtype=torch.float32, device=a_t.device)
    first = 0
    for group, rows in _rows(ends):
        own = slice(first, first + rows.stop - rows.start)
        output[group] = a_t[:, own].to(torch.float32) @ b_t[:, own].to(torch.float32).t()
        first += -(-(own.stop - own.start) // GROUP_BLOCK) * GROUP_BLOCK
    return (output * (scale_inv_a * scale_inv_b)).to(out_dtype)
