"""Kernels that kernels_tune.py times: how each is called, and the launch settings that are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_ds.nn.linear.payload import ROW, TILE, Granularity
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.masters import E4M11
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops import squares
from fp8_ds.ops.adamw import decode_master
from fp8_ds.ops.blockwise import dequantize_groupwise, quantize_blockwise, quantize_groupwise, transpose_blockwise
from fp8_ds.ops.quantize import (
    quantize,
    quantize_and_transpose_delayed,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_part,
    quantize_rowwise,
    quantize_tensorwise,
    record_amax,
)
from fp8_ds.ops.rmsnorm import rmsnorm, rmsnorm_backward
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_and_columns,
    swiglu_backward_kept,
    swiglu_backward_to_fp8,
    swiglu_columns,
)
from fp8_ds.ops.transpose import transpose

NARROW, WIDE, WEIGHT, KV = (8192, 4096), (8192, 14336), (14336, 4096), (8192, 1024)
HIDDEN = (NARROW, (8192, 8192))
"""Of 8B and of 70B."""

Setting = dict[str, Any]
"""Constant to value; "WARPS.tile" is an entry of a dict."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, called on a tensor or on several, and what is tried.

    Args:
        module: below fp8_ds.ops, whose constants are set.
        tries: constant to values; all combinations that `fits` allows. Empty: it is timed as it ships.
        bytes_per_element: that must move, of the matrix that has a shape of `shapes`.
        inputs: makes what `call` takes, for one set.
    """

    name: str
    module: str
    tries: dict[str, tuple[Any, ...]]
    bytes_per_element: float
    inputs: Callable[[int, int, str], Any]
    call: Callable[[Any], Any]
    shapes: tuple[tuple[int, int], ...]
    fits: Callable[[Setting], bool]

    def settings(self) -> Iterator[Setting]:
        for values in itertools.product(*self.tries.values()):
            setting = dict(zip(self.tries, values, strict=True))
            if self.fits(setting):
                yield setting


def _matrix(rows: int, cols: int, device: str) -> Tensor:
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16)


def _master(rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """fp32, and scales of its rows and of its tiles."""
    grids = (torch.ones(granularity.grid((rows, cols)), device=device) for granularity in (ROW, TILE))
    return torch.randn(rows, cols, device=device), *grids


def _folded(rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    return _matrix(rows, cols, device), torch.rand(cols, device=device), torch.rand(rows, device=device)


def _codes(rows: int, cols: int, device: str) -> Tensor:
    return torch.randint(0x20, 0x60, (rows, cols), device=device, dtype=torch.uint8).view(E4M3.dtype)


def _masters(rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e4m11: high and low parts, their scale, and what they are written to."""
    codes = _codes(rows, cols, device).view(torch.uint8).flatten()
    low = torch.randint(-128, 128, (rows * cols,), device=device, dtype=torch.int8)
    return codes, low, torch.ones((), device=device), torch.empty(rows * cols, device=device, dtype=torch.bfloat16)


def _decoded(x: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    decode_master(x[0], x[1], E4M11, x[2], x[3])
    return x[3]


def _scaled(rows: int, cols: int, device: str) -> tuple[Tensor, Any]:
    return _matrix(rows, cols, device), AmaxHistory(2, [E4M3.max, E5M2.max], device=device)


def _three(rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor, Any]:
    return *(_matrix(rows, cols, device) for _ in range(3)), AmaxHistory(2, [E4M3.max, E5M2.max], device=device)


def _two(rows: int, cols: int, device: str) -> tuple[dict[int, squares.SumOfSquares], list[Tensor]]:
    return {}, [_matrix(rows, cols, device) for _ in range(2)]


def _kept(rows: int, cols: int, device: str) -> Any:
    gate, up, grad, history = _three(rows, cols, device)
    return quantize_groupwise(gate), quantize_groupwise(up), grad, history


def _beside(x: Any) -> Any:
    return swiglu_backward_and_columns(x[2], x[0], x[1], (E4M3, E5M2), tuple(x[3].slot(k) for k in (0, 1, 1)))


def _delayed(x: tuple[Tensor, Any], layout: Any) -> Any:
    slot = x[1].slot(0)
    return quantize_and_transpose_delayed(x[0], slot.scale, slot.scale_inv, slot.amax_local, E4M3, layout, record=True)


def _norm_inputs(rows: int, cols: int, device: str) -> Any:
    return (
        *_three(rows, cols, device),
        torch.ones(cols, device=device, dtype=torch.bfloat16),
        torch.ones(rows, device=device),
    )


def _block_codes(rows: int, cols: int, device: str) -> Any:
    quantized = quantize_blockwise(_matrix(rows, cols, device), E4M3, (1, 128), "row")
    return quantized.x_fp8, quantized.scale_inv


def _tile_is_of_warps(words: str, warps: str, vectors: str = "") -> Callable[[Setting], bool]:
    """16 to 128 blocks of 16 x 4 elements for a warp (ops/transpose): fewer leave threads idle, more spill."""

    def fits(setting: Setting) -> bool:
        return 16 <= setting.get(vectors, 4) * setting[words] / setting[warps] <= 128

    return fits


def _quarter_is_of_warps(quarter: str, warps: str) -> Callable[[Setting], bool]:
    """32 to 128 elements of each tensor for a thread (ops/_tiles.py)."""
    return lambda setting: 32 <= 4 * setting[quarter] * 4 / setting[warps] <= 128


def _cast_by_grid(granularity: Granularity, x: tuple[Tensor, Tensor, Tensor]) -> Any:
    """How a step casts an fp32 master by the scales of its rows or tiles."""
    cols = x[0].shape[1]
    grid = x[1] if granularity is ROW else x[2]
    return quantize_part(x[0].flatten(), grid, 0, cols, (granularity.block[0] or 1, granularity.block[1] or cols), E4M3)


def _amax(x: Tensor) -> Tensor:
    measured = torch.zeros((), dtype=torch.float32, device=x.device)
    record_amax(x, measured)
    return measured


def _sum_of_squares(x: tuple[dict[int, squares.SumOfSquares], list[Tensor]]) -> Tensor:
    """With tables of its own for each size of program."""
    return x[0].setdefault(squares.BLOCK * squares.SPAN, squares.SumOfSquares())(x[1])


def _norm(x: Any, scaling: Any = None) -> Any:
    return rmsnorm(x[0], x[4], 1e-5, E4M3, scaling or x[3].slot(0))


def _by_transpose(x: Any) -> Tensor:
    return transpose(swiglu(x[0], x[1], E4M3, x[3].slot(0), record=False)[0].x_fp8)


def _columns(x: Any) -> Any:
    return swiglu_columns(x[0], x[1], E4M3, x[3].slot(0))


def _backward_kept(x: Any) -> Any:
    return swiglu_backward_kept(x[2], x[0], x[1], E5M2, (x[3].slot(1),) * 2)


def _kernel(
    name: str, module: str, num_bytes: float, inputs: Callable[[int, int, str], Any], call: Callable[[Any], Any],
    shapes: tuple[tuple[int, int], ...] = (NARROW, WIDE), fits: Callable[[Setting], bool] = lambda setting: True,
    **tries: tuple[Any, ...],
) -> Kernel:  # fmt: skip
    return Kernel(
        name, module if module == "squares" else f"{module}.triton", tries, num_bytes, inputs, call, shapes, fits
    )


def _by_own_scales(scaling: Any, reads: int) -> Iterator[Kernel]:
    """RMSNorm and SwiGLU with scales of what they write."""
    yield _kernel(f"rmsnorm {scaling}", "rmsnorm", 2 * reads + 1, _norm_inputs, lambda x: _norm(x, scaling), HIDDEN)
    yield _kernel(
        f"swiglu {scaling}", "swiglu", 4 * reads + 1, _three, lambda x: swiglu(x[0], x[1], E4M3, scaling), (WIDE,)
    )


def _of_master(name: str, of: Granularity) -> Iterator[Kernel]:
    yield _kernel(f"master amax by {name}", "quantize", 4, _master, lambda x: of.amax(x[0].flatten(), x[0].shape))
    yield _kernel(f"master cast by {name}", "quantize", 5, _master, lambda x: _cast_by_grid(of, x))


def _quantize_and_transpose(layout: Any) -> Kernel:
    return _kernel(
        f"quantize and transpose {layout}", "quantize", 4 if layout == "both" else 3, _scaled,
        lambda x: _delayed(x, layout),
        (NARROW, WIDE, KV), _quarter_is_of_warps("TRANSPOSE_QUARTER", "TRANSPOSE_WARPS"),
        TRANSPOSE_QUARTER=(8, 16, 32, 64), TRANSPOSE_WARPS=(2, 4, 8),
    )  # fmt: skip


def _blockwise(rows: int, layout: Any) -> Kernel:
    return _kernel(
        f"blockwise {rows}x128 {layout}", "blockwise", 4 if layout == "both" else 3, _matrix,
        lambda x: quantize_blockwise(x, E4M3, (rows, 128), layout),
        fits=lambda s: s["WARPS.tile"] * 32 * s["_TILE_REGISTERS"] <= 65536,
        **{"WARPS.tile": (4, 8), "_TILE_REGISTERS": (128, 168, 255)},
    )  # fmt: skip


# fmt: off
KERNELS = (
    _kernel("transpose", "transpose", 2, _codes, transpose, (NARROW, WEIGHT, WIDE),
            _tile_is_of_warps("WORDS", "NUM_WARPS", "VECTORS"),
            VECTORS=(2, 4, 8, 16), WORDS=(8, 16, 32, 64), NUM_WARPS=(1, 2, 4, 8)),
    _quantize_and_transpose("both"),
    _quantize_and_transpose("col"),
    _kernel("rows given", "quantize", 3, _scaled, lambda x: quantize(x[0], x[1].scale[0], E4M3)),
    _kernel("tensorwise", "quantize", 5, _matrix, lambda x: quantize_tensorwise(x, E4M3)),
    _kernel("tensorwise both", "quantize", 6, _matrix, lambda x: quantize_and_transpose_tensorwise(x, E4M3, "both")),
    _kernel("rows by their own", "quantize", 3, _matrix, lambda x: quantize_rowwise(x, E4M3)),
    _kernel("rows by their own, fold", "quantize", 3, _folded, lambda x: quantize_rowwise(x[0], E4M3, x[1])),
    _kernel("columns by their own", "quantize", 5, _matrix, lambda x: quantize_colwise_t(x, E4M3),
            COLS_ROWS=(4, 8), COLS_UNROLL=(4, 8), COLS_TILES=(1, 2, 4), COLS_ONCE_BYTES=(0, 64 << 20)),
    _kernel("columns by their own, fold", "quantize", 5, _folded, lambda x: quantize_colwise_t(x[0], E4M3, x[2])),
    *_of_master("row", ROW),
    *_of_master("tile", TILE),
    _kernel("amax", "quantize", 2, _matrix, _amax,
            fits=lambda s: s["AMAX_WORDS"] / s["AMAX_WARPS"] <= 512 and s["AMAX_PROGRAMS"] * s["AMAX_WARPS"] <= 64,
            AMAX_WORDS=(4096, 8192, 16384), AMAX_WARPS=(8, 16, 32), AMAX_PROGRAMS=(1, 2, 3)),
    _kernel("squares", "squares", 2, _two, _sum_of_squares,
            BLOCK=(8192, 16384, 32768), SPAN=(1, 4, 16), NUM_WARPS=(4, 8, 16)),
    _kernel("masters to bf16", "adamw", 4, _masters, _decoded, (WEIGHT,),
            lambda s: 4 <= s["DECODE_BLOCK"] / s["DECODE_WARPS"] / 32 <= 64,
            DECODE_BLOCK=(1024, 2048, 4096, 8192), DECODE_WARPS=(4, 8)),
    _kernel("rmsnorm", "rmsnorm", 3, _norm_inputs, _norm, HIDDEN, _PER_THREAD=(16, 32, 64), _AHEAD_WARPS=(8, 16, 32)),
    _kernel("rmsnorm_backward", "rmsnorm", 6, _norm_inputs, lambda x: rmsnorm_backward(x[0], x[1], x[4], x[5]), HIDDEN,
            _PER_THREAD_BACKWARD=(8, 16), _BACKWARD_WARPS=(16, 32), _SUM_COLS=(8, 32)),
    *_by_own_scales("rowwise", 1),
    *_by_own_scales("tensorwise", 2),
    _kernel("swiglu_backward_to_fp8 tensorwise", "swiglu", 14, _three,
            lambda x: swiglu_backward_to_fp8(x[2], x[0], x[1], E5M2, ("tensorwise", "tensorwise")), (WIDE,)),
    _kernel("swiglu", "swiglu", 5, _three, lambda x: swiglu(x[0], x[1], E4M3, x[3].slot(0)), (WIDE,),
            _BLOCK=(1024, 2048, 4096)),
    _kernel("swiglu_backward", "swiglu", 10, _three, lambda x: swiglu_backward(x[2], x[0], x[1]), (WIDE,)),
    _kernel("swiglu_backward_to_fp8", "swiglu", 8, _three,
            lambda x: swiglu_backward_to_fp8(x[2], x[0], x[1], E5M2, (x[3].slot(0), x[3].slot(1))), (WIDE,),
            _BLOCK=(1024, 2048, 4096)),
    _kernel("swiglu_columns", "swiglu", 5, _three, _columns, (WIDE,),
            _quarter_is_of_warps("_COLUMNS_QUARTER", "_COLUMNS_WARPS"),
            _COLUMNS_QUARTER=(8, 16, 32), _COLUMNS_WARPS=(2, 4, 8)),
    _kernel("swiglu_columns by a transpose", "swiglu", 5, _three, _by_transpose, (WIDE,)),
    _kernel("swiglu_backward_and_columns", "swiglu", 9, _three, _beside, (WIDE,),
            _BOTH_QUARTER=(8, 16), _BOTH_WARPS=(4, 8)),
    _kernel("swiglu_backward_kept", "swiglu", 6, _kept, _backward_kept, (WIDE,),
            _BOTH_QUARTER=(8, 16), _BOTH_WARPS=(4, 8)),
    _kernel("swiglu_columns, kept in FP8", "swiglu", 3, _kept, _columns, (WIDE,),
            _KEPT_QUARTER=(8, 16), _KEPT_WARPS=(4, 8)),
    _kernel("blockwise 1x128 row", "blockwise", 3, _matrix, lambda x: quantize_blockwise(x, E4M3, (1, 128), "row")),
    _blockwise(1, "both"),
    _blockwise(1, "col"),
    _blockwise(128, "row"),
    _blockwise(128, "both"),
    _kernel("groupwise back", "blockwise", 3, _block_codes, lambda x: dequantize_groupwise(*x),
            fits=lambda s: 16 <= s["DEQUANTIZE_ROWS"] * 128 / s["WARPS.dequantize"] / 32 <= 64,
            **{"DEQUANTIZE_ROWS": (16, 32, 64), "WARPS.dequantize": (2, 4, 8)}),
    _kernel("blockwise transpose", "blockwise", 2, _block_codes, lambda x: transpose_blockwise(*x), (NARROW, WEIGHT),
            **{"WARPS.tile": (2, 4, 8, 16)}),
)
# fmt: on
