"""Launches of the kernels of kernel.py: same arguments and results as the functions of `reference`.

`x` is contiguous and has elements, and a given scale is 0-dim. On CPU these run under Triton's interpreter only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import runs_ptx
from fp8_ds.ops._launch import ceil_div, launch, num_processors
from fp8_ds.ops._tiles import as_words, num_tiles, tile_options
from fp8_ds.ops.quantize import kernel
from fp8_ds.ops.quantize.multi_tensor import PROGRAM

_ALIGNMENT = 16
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

AMAX_WORDS, AMAX_WARPS, AMAX_PROGRAMS = 16384, 32, 1
"""Launch of `amax`: words of a tile, warps of a program, programs a multiprocessor. 16 words a thread are 128 bytes of
bf16 on their way; one long program on each leaves few maxima for the cast to read, and none waits for a second turn."""

CAST_WORDS, CAST_WARPS = PROGRAM // 4, 4
"""Launch of a cast without transpose: words and warps of a program."""

TRANSPOSE_QUARTER, TRANSPOSE_WARPS = 16, 4
"""Launch of a cast with transpose: a quarter of a program's rows (ops/_tiles.py), and its warps."""

COLS_ROWS, COLS_UNROLL, COLS_TILES, COLS_WORDS, COLS_WARPS = 4, 8, 4, 64, 8
"""Launch of the amaxes of columns: a program for 128 rows and 256 columns."""

COLS_ONCE_BYTES = 64 << 20
"""Largest input whose cast by columns lets go of what it has read, so that its results do not push out of the L2 cache
(50 MB) what the amaxes left there. Of larger ones little was left, and it is slower: an H100's 5 % faster at 32 MiB,
1 % at 64, 2 % slower at 128 (benchmarks/results/2026-11-26-kernels-trial.md)."""

ROW_WORDS, MAX_ROW_WORDS, WORDS_PER_THREAD = 2048, 4096, 16
"""Launch of a cast by rows: words of a program, most words of a row that stays in registers, words of a thread."""


def _is_vector(*sizes: int, at: tuple[Tensor | None, ...]) -> bool:
    """Whether rows of these sizes, from tensors that begin at a vector, are split into whole vectors."""
    for size in sizes:
        if size % _ALIGNMENT:
            return False
    return all(tensor is None or tensor.data_ptr() % _ALIGNMENT == 0 for tensor in at)


def _options(x: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    return {"IS_E4M3": dtype == torch.float8_e4m3fn, "PTX": runs_ptx(x), "enable_fp_fusion": False}


def _scalar(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _num_amax_programs(x: Tensor) -> int:
    """Return enough programs to fill the device, and no more than the casts read maxima of."""
    most = min(AMAX_PROGRAMS * num_processors(x.device), kernel.MAX_PARTIALS.value)
    return min(most, ceil_div(x.numel(), AMAX_WORDS * 4))


def _launch_amax(x: Tensor, out: Tensor, num_programs: int, *, atomic: bool) -> None:
    launch(
        kernel.amax_kernel,
        num_programs,
        x,
        out,
        x.numel(),
        WORDS=AMAX_WORDS,
        ATOMIC=atomic,
        VECTOR=_is_vector(x.numel(), at=(x,)),
        PTX=runs_ptx(x),
        num_warps=AMAX_WARPS,
    )


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    _launch_amax(x, amax_local, _num_amax_programs(x), atomic=True)


def _partial_amaxes(x: Tensor) -> Tensor:
    """Return int32 [num_programs], bits of maxima whose maximum is the amax of `x`. They need no zeroing."""
    num_programs = _num_amax_programs(x)
    partials = torch.empty(num_programs, dtype=torch.int32, device=x.device)
    _launch_amax(x, partials, num_programs, atomic=False)
    return partials


def _cast(
    x: Tensor,
    dtype: torch.dtype,
    mode: int,
    *,
    scale: Tensor | None = None,
    partials: Tensor | None = None,
    scale_inv: Tensor | None = None,
    amax_local: Tensor | None = None,
) -> Tensor:
    """Launch `quantize_kernel` once."""
    out = torch.empty_like(x, dtype=dtype)
    launch(
        kernel.quantize_kernel,
        ceil_div(x.numel(), CAST_WORDS * 4),
        x,
        out.view(torch.uint8),
        scale,
        partials,
        0 if partials is None else partials.numel(),
        scale_inv,
        amax_local,
        x.numel(),
        WORDS=CAST_WORDS,
        MODE=mode,
        RECORD=amax_local is not None,
        VECTOR=_is_vector(x.numel(), at=(x,)),
        num_warps=CAST_WARPS,
        **_options(x, dtype),
    )
    return out


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    return _cast(x, dtype, kernel.GIVEN.value, scale=scale)


def quantize_part(
    x: Tensor, grid: Tensor, start: int, num_cols: int, block_rows: int, block_cols: int, dtype: torch.dtype,
    fp8_max: float,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(x, dtype=dtype)
    launch(
        kernel.part_kernel,
        ceil_div(x.numel(), CAST_WORDS * 4),
        x,
        out.view(torch.uint8),
        grid,
        grid.shape[1],
        start,
        x.numel(),
        num_cols,
        block_rows,
        block_cols,
        WORDS=CAST_WORDS,
        ONE_SCALE=start % 4 == 0 and num_cols % 4 == 0 and block_cols % 4 == 0,
        VECTOR=_is_vector(x.numel(), at=(x,)),
        num_warps=CAST_WARPS,
        **_options(x, dtype),
    )
    return out


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
    """Launch once; `table` has what `places` and the addresses say, and `is_vector` holds for every part."""
    launch(
        kernel.parts_kernel,
        len(program_parts),
        table,
        program_parts,
        DTYPE=_TRITON_DTYPES[xs[0].dtype],
        WORDS=CAST_WORDS,
        ONE_GRID=grids[0].dim() == 0,
        ONE_SCALE=has_one_scale,
        VECTOR=is_vector,
        num_warps=CAST_WARPS,
        **_options(xs[0], outs[0].dtype),
    )


def quantize_tensorwise(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    scale_inv = _scalar(x)
    x_fp8 = _cast(x, dtype, kernel.CURRENT.value, partials=_partial_amaxes(x), scale_inv=scale_inv)
    return x_fp8, scale_inv


def quantize_tensor_pow2(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    scale_inv = _scalar(x)
    x_fp8 = _cast(x, dtype, kernel.POW2.value, partials=_partial_amaxes(x), scale_inv=scale_inv)
    return x_fp8, scale_inv


def _cast_and_transpose(
    x: Tensor,
    dtype: torch.dtype,
    mode: int,
    layout: str,
    *,
    scale: Tensor | None = None,
    partials: Tensor | None = None,
    amax_cols: Tensor | None = None,
    fold: Tensor | None = None,
    scale_inv: Tensor | None = None,
    amax_local: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `quantize_and_transpose_kernel` once, or `quantize_kernel` where only the plain layout is wanted."""
    none = torch.empty(0, dtype=dtype, device=x.device)
    if layout == "row":
        x_fp8 = _cast(x, dtype, mode, scale=scale, partials=partials, scale_inv=scale_inv, amax_local=amax_local)
        return x_fp8, none
    num_rows, num_cols = x.shape
    has_rows = layout == "both"
    x_fp8 = torch.empty_like(x, dtype=dtype) if has_rows else none
    x_fp8_t = torch.empty((num_cols, num_rows), dtype=dtype, device=x.device)
    columns = as_words(x_fp8_t)
    launch(
        kernel.quantize_and_transpose_kernel,
        num_tiles(num_rows, num_cols, TRANSPOSE_QUARTER),
        x,
        x_fp8.view(torch.uint8),
        columns,
        scale,
        partials,
        0 if partials is None else partials.numel(),
        amax_cols,
        fold,
        scale_inv,
        amax_local,
        num_rows,
        num_cols,
        MODE=mode,
        RECORD=amax_local is not None,
        HAS_ROWS=has_rows,
        HAS_FOLD=fold is not None,
        ONCE=mode == kernel.COLUMNS.value and x.numel() * x.element_size() <= COLS_ONCE_BYTES,
        num_warps=TRANSPOSE_WARPS,
        **tile_options(TRANSPOSE_QUARTER, num_rows, num_cols, columns),
        **_options(x, dtype),
    )
    return x_fp8, x_fp8_t


def quantize_and_transpose_tensorwise(
    x: Tensor, dtype: torch.dtype, fp8_max: float, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    scale_inv, partials = _scalar(x), _partial_amaxes(x)
    x_fp8, x_fp8_t = _cast_and_transpose(x, dtype, kernel.CURRENT.value, layout, partials=partials, scale_inv=scale_inv)
    return x_fp8, x_fp8_t, scale_inv


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
    out_scale_inv = scale_inv.clone()
    recorded = amax_local if record else None
    x_fp8, x_fp8_t = _cast_and_transpose(
        x, dtype, kernel.DELAYED.value, layout, scale=scale, scale_inv=out_scale_inv, amax_local=recorded
    )
    return x_fp8, x_fp8_t, out_scale_inv


def quantize_rowwise(x: Tensor, fold: Tensor | None, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scale_inv = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    # A vector of each thread of a warp at least.
    words = min(max(triton.next_power_of_2(ceil_div(num_cols, 4)), 128), MAX_ROW_WORDS)
    rows = max(ROW_WORDS // words, 1)
    launch(
        kernel.rowwise_kernel,
        ceil_div(num_rows, rows),
        x,
        out.view(torch.uint8),
        fold,
        scale_inv,
        num_rows,
        num_cols,
        ROWS=rows,
        WORDS=words,
        LOOP=num_cols > words * 4,
        HAS_FOLD=fold is not None,
        VECTOR=_is_vector(num_cols, at=(x, fold)),
        num_warps=rows * words // (32 * WORDS_PER_THREAD),
        **_options(x, dtype),
    )
    return out, scale_inv


def quantize_colwise_t(x: Tensor, fold: Tensor | None, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = x.shape
    amax_cols = torch.zeros(num_cols, dtype=torch.int32, device=x.device)
    launch(
        kernel.amax_cols_kernel,
        ceil_div(num_rows, COLS_ROWS * COLS_UNROLL * COLS_TILES) * ceil_div(num_cols, COLS_WORDS * 4),
        x,
        fold,
        amax_cols,
        num_rows,
        num_cols,
        ROWS=COLS_ROWS,
        UNROLL=COLS_UNROLL,
        NUM_TILES=COLS_TILES,
        WORDS=COLS_WORDS,
        HAS_FOLD=fold is not None,
        VECTOR=_is_vector(num_cols, at=(x,)),
        PTX=runs_ptx(x),
        num_warps=COLS_WARPS,
        enable_fp_fusion=False,
    )
    scale_inv = torch.empty((num_cols, 1), dtype=torch.float32, device=x.device)
    _, x_fp8_t = _cast_and_transpose(
        x, dtype, kernel.COLUMNS.value, "col", amax_cols=amax_cols, fold=fold, scale_inv=scale_inv
    )
    return x_fp8_t, scale_inv
