"""Test inputs whose ranges differ from place to place, as those of real networks do.

A test on plain normal inputs passes with a scale that is shared, transposed or off by a tile; these do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 16
"""Rows and columns that share a scale in `per_tile`; small, so that small tensors have many tiles."""

_LOG2_SPREAD = 3.0
"""Standard deviation of log2 of the scales: two thirds lie within a factor 8 of the middle."""

_OUTLIER = 100.0
"""Factor of the outlier channel, between what trained language models show in whole channels (about 20: Dettmers et
al., arXiv 2208.07339) and in single activations (thousands: Sun et al., arXiv 2402.17762)."""


def _scales(num: int, generator: torch.Generator) -> Tensor:
    return torch.exp2(_LOG2_SPREAD * torch.randn(num, generator=generator))


def per_row(num_rows: int, num_cols: int, generator: torch.Generator) -> Tensor:
    """Normal values, each row times its own lognormal scale."""
    return torch.randn(num_rows, num_cols, generator=generator) * _scales(num_rows, generator)[:, None]


def per_column(num_rows: int, num_cols: int, generator: torch.Generator) -> Tensor:
    """Normal values, each column times its own lognormal scale."""
    return torch.randn(num_rows, num_cols, generator=generator) * _scales(num_cols, generator)[None, :]


def per_tile(num_rows: int, num_cols: int, generator: torch.Generator) -> Tensor:
    """Normal values, each 16 x 16 tile times its own lognormal scale; ragged tiles at the edges."""
    tile_rows, tile_cols = -(-num_rows // TILE), -(-num_cols // TILE)
    scales = _scales(tile_rows * tile_cols, generator).reshape(tile_rows, tile_cols)
    expanded = scales.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:num_rows, :num_cols]
    return torch.randn(num_rows, num_cols, generator=generator) * expanded


def outlier_channel(num_rows: int, num_cols: int, generator: torch.Generator) -> Tensor:
    """Normal values, one random column a hundred times larger."""
    x = torch.randn(num_rows, num_cols, generator=generator)
    x[:, int(torch.randint(num_cols, (), generator=generator))] *= _OUTLIER
    return x


MANY_SCALES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "per_row": per_row,
    "per_column": per_column,
    "per_tile": per_tile,
    "outlier_channel": outlier_channel,
}


def many_scales(family: str, num_rows: int, num_cols: int, seed: int = 0) -> Tensor:
    """float32 [num_rows, num_cols] on CPU, of one of the families in MANY_SCALES; the same for the same seed."""
    if family not in MANY_SCALES:
        raise ValueError(f"family: expected one of {tuple(MANY_SCALES)}, got {family!r}. Use one of these.")
    return MANY_SCALES[family](num_rows, num_cols, torch.Generator().manual_seed(seed))
