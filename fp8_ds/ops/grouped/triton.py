"""Launches of the grouped products' kernels: tiles by shape, programs by the GPU's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8_ds.ops._device import runs_ptx
from fp8_ds.ops._launch import ceil_div, launch, num_processors
from fp8_ds.ops.grouped import kernel
from fp8_ds.ops.grouped.reference import GROUP_BLOCK, num_columns
from fp8_ds.ops.transpose.triton import NUM_WARPS, VECTORS, WORDS


@dataclass(frozen=True)
class Tiles:
    """Tiles of a product, and how they are run.

    Args:
        rows: rows of a tile of the result.
        cols: columns of a tile of the result.
        inner: elements contracted at a time; a divisor of `GROUP_BLOCK`.
        tall: rows of tiles that are taken column by column.
        flatten: whether the next tile is fetched while one is stored, where there are as many programs as fit.
        programs: programs for each multiprocessor; 0: one a tile.
        num_warps: warps of a program.
        num_stages: tiles that are under way.
        halves: steps in which the columns of a tile are computed, 1 or 2 (kernel.py).
    """

    rows: int = 128
    cols: int = 256
    inner: int = 128
    tall: int = 8
    flatten: bool = True
    programs: int = 1
    num_warps: int = 8
    num_stages: int = 3
    halves: int = 1

    def options(self, num_groups: int, fast: bool) -> dict[str, Any]:
        return {
            "GROUPS": 1 << num_groups.bit_length(),
            "BLOCK_M": self.rows,
            "BLOCK_N": self.cols,
            "BLOCK_K": self.inner,
            "SUPER": self.tall,
            "HALVES": self.halves,
            "FAST": fast,
            "FLATTEN": self.flatten,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def num_programs(self, num_tiles: int, device: torch.device) -> int:
        return min(num_tiles, self.programs * num_processors(device)) if self.programs else num_tiles


# Ratios of times are of an H200, of E5M2 by E4M3 where sums are accurate: products of Qwen3-30B-A3B's 128 experts with
# 65,536 rows, 512 an expert, and of Mixtral 8x7B's 8 with 16,384 (docs/decisions/0011).
_WIDE, _WIDE_ACCURATE = Tiles(), Tiles(halves=2)
"""Large tiles are read by fewer others. Sums beside the tensor core's take registers: half a tile's at a time fit."""
_TWO = Tiles(cols=128, programs=2, num_warps=4, flatten=False)
"""Two programs a multiprocessor: one stores while the other multiplies."""
_TWO_OF_8, _TWO_OF_8_ACCURATE = (
    Tiles(cols=128, programs=2, flatten=False),
    Tiles(cols=128, programs=2, flatten=False, halves=2),
)
"""The same with twice the warps, which multiply and store what is short sooner."""
_LONG_SUM = 1024
"""Columns from which `_TWO_OF_8_ACCURATE` takes 0.92 to 0.93 of the time of `_WIDE_ACCURATE` (2048 and 4096); at 768 it
takes 1.05."""
_LONG_GROUP = 768
"""Columns a group, on average and with the most zeros that there can be (512 rows: 639), from which `_TWO` is taken:
with accurate sums 0.63 of the time of `_TWO_OF_8_ACCURATE` at 2,048 rows, 1.07 at 512."""


def rows_tiles(num_cols: int, num_inner: int, out_dtype: torch.dtype, fast: bool) -> Tiles:
    """Choose tiles for `rows_by_matrices`.

    Tiles that are not wide take at least 1.07 of the time for fast sums. A wide tile of float32 has no room while the
    next one is fetched.
    """
    is_wide = num_cols > 128 and out_dtype.itemsize < 4
    if fast:
        return _WIDE if is_wide else _TWO
    return _WIDE_ACCURATE if is_wide and num_inner < _LONG_SUM else _TWO_OF_8_ACCURATE


def matrices_tiles(num_columns: int, num_groups: int, fast: bool) -> Tiles:
    """Choose tiles for `columns_by_columns`, which stores much and contracts over few columns where groups are small.

    Fast sums take 1.02 of the time in `_TWO` at 512 rows; with longer groups they are not measured.
    """
    if num_columns >= _LONG_GROUP * num_groups:
        return _TWO
    return _TWO_OF_8 if fast else _TWO_OF_8_ACCURATE


def _tiled(x: Tensor, num_rows: int, num_cols: int) -> TensorDescriptor:
    if x.data_ptr() % 16:
        x = x.clone()
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [num_rows, num_cols])


def rows_by_matrices(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """Triton version of `reference.rows_by_matrices`; on CPU only under Triton's interpreter."""
    (num_rows, num_inner), (num_groups, num_cols, _) = a.shape, b.shape
    if num_rows == 0 or num_cols == 0 or num_inner == 0 or num_groups == 0:
        return torch.zeros(num_rows, num_cols, dtype=out_dtype, device=a.device)
    out = torch.empty(num_rows, num_cols, dtype=out_dtype, device=a.device)
    tiles = tiles or rows_tiles(num_cols, num_inner, out_dtype, fast)
    # The last tile of each group may be ragged, and so may that of the rows behind them.
    most = (num_rows // tiles.rows + min(num_groups + 1, num_rows)) * ceil_div(num_cols, tiles.cols)
    launch(
        kernel.rows_kernel,
        tiles.num_programs(most, a.device),
        out,
        _tiled(a, tiles.rows, tiles.inner),
        _tiled(b.view(-1, num_inner), tiles.cols // tiles.halves, tiles.inner),
        ends,
        scale_inv_a,
        scale_inv_b,
        num_rows,
        num_cols,
        num_inner,
        num_groups,
        **tiles.options(num_groups, fast),
    )
    return out


def columns(x: Tensor, ends: Tensor) -> Tensor:
    """Triton version of `reference.columns`, except that nothing is written after the last group's zeros."""
    (num_rows, num_cols), num_groups = x.shape, len(ends)
    num_out = num_columns(num_rows, num_groups)
    out_t = torch.empty(num_cols, num_out, dtype=x.dtype, device=x.device)
    if out_t.numel() == 0:
        return out_t
    launch(
        kernel.columns_kernel,
        num_out // (VECTORS * 16) * ceil_div(num_cols, WORDS * 4),
        x.view(torch.uint8),
        out_t.view(torch.uint8),
        ends,
        num_cols,
        num_out,
        num_groups,
        GROUPS=1 << num_groups.bit_length(),
        VECTORS=VECTORS,
        WORDS=WORDS,
        VECTOR_IN=num_cols % 16 == 0 and x.data_ptr() % 16 == 0,
        PTX=runs_ptx(x),
        num_warps=NUM_WARPS,
    )
    return out_t


def columns_by_columns(
    a_t: Tensor,
    b_t: Tensor,
    ends: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """Triton version of `reference.columns_by_columns`; on CPU only under Triton's interpreter."""
    num_a, num_b, num_groups = a_t.shape[0], b_t.shape[0], len(ends)
    out = torch.empty(num_groups, num_a, num_b, dtype=out_dtype, device=a_t.device)
    if a_t.numel() == 0 or b_t.numel() == 0 or num_groups == 0:
        return out.zero_()
    tiles = tiles or matrices_tiles(a_t.shape[1], num_groups, fast)
    assert GROUP_BLOCK % tiles.inner == 0
    num_tiles = num_groups * ceil_div(num_a, tiles.rows) * ceil_div(num_b, tiles.cols)
    launch(
        kernel.matrices_kernel,
        tiles.num_programs(num_tiles, a_t.device),
        out,
        _tiled(a_t, tiles.rows, tiles.inner),
        _tiled(b_t, tiles.cols // tiles.halves, tiles.inner),
        ends,
        scale_inv_a,
        scale_inv_b,
        num_a,
        num_b,
        num_groups,
        **tiles.options(num_groups, fast),
    )
    return out
