"""High precision to FP8: `x_fp8 = cast(x * scale)`, saturating; `x ~ x_fp8 * scale_inv`.

Infinities saturate in the cast, as in the hardware's saturating conversion. Where the amax is at hand (all but
`quantize` and `quantize_planes`) a non-finite input therefore makes scale_inv NaN, and so everything that is
de-quantised with it. NaN stays NaN; its sign is not kept.

Hopper's FP8 GEMM contracts the last dim of both operands, so one matrix is wanted in two layouts by the GEMMs of a
linear. Functions with `planes` make "row", the layout of `x`, "col", its transpose, or "both" in one read.

CUDA runs the kernels of triton.py. Plain torch casts there what they do not take and only the functions without a
matrix's shape in their arguments allow: tensors that are not contiguous or float64, and scales that are not 0-dim.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops.quantize import _ops

Planes = Literal["row", "col", "both"]
PLANES: tuple[Planes, ...] = ("row", "col", "both")


def _check_scale(scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise ValueError(f"scale: expected float32, got {scale.dtype}. Scales are kept in float32 throughout.")


def _check_matrix(x: Tensor) -> None:
    if x.dim() != 2 or not x.is_contiguous() or x.dtype not in _ops.KERNEL_DTYPES:
        raise ValueError(
            f"x: expected a contiguous matrix in bfloat16, float16 or float32, got {x.dtype} {tuple(x.shape)} with "
            f"strides {x.stride()}. Call contiguous() or to() first."
        )


def _check_scalar(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 0 or tensor.dtype != torch.float32:
        raise ValueError(
            f"{name}: expected float32, 0-dim, got {tensor.dtype} {tuple(tensor.shape)}. A scale per row or column "
            "comes from quantize_rowwise or quantize_colwise_t."
        )


def _check_fold(fold: Tensor | None, size: int) -> None:
    if fold is None:
        return
    if fold.dtype != torch.float32 or tuple(fold.shape) not in ((size,), (size, 1)) or not fold.is_contiguous():
        raise ValueError(
            f"fold: expected float32 [{size}] or [{size}, 1], contiguous, got {fold.dtype} {tuple(fold.shape)} with "
            f"strides {fold.stride()}. It has a factor for each element of the axis that the next GEMM contracts."
        )


def _check_planes(planes: str) -> None:
    if planes not in PLANES:
        raise ValueError(f"planes: expected one of {PLANES}, got {planes!r}. Use one of these.")


def _named(row_plane: Tensor, col_plane: Tensor, planes: str) -> tuple[Tensor | None, Tensor | None]:
    """An op returns an empty tensor for a plane that it does not make."""
    return None if planes == "col" else row_plane, None if planes == "row" else col_plane


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` in one read.

    Args:
        x: bf16, fp16 or fp32, any shape and layout.

    Returns:
        float32, 0-dim; 0 for an empty tensor; NaN or infinity if `x` holds one.
    """
    measured: Tensor = _ops.amax(x)
    return measured


def quantize(x: Tensor, scale: Tensor, fmt: Float8Format) -> Tensor:
    """`x` in FP8 by a scale that is already known.

    Elementwise, so cutting `x` into shards and quantising them by the same scale gives the same bytes.

    Args:
        x: bf16, fp16 or fp32, any shape.
        scale: float32, 0-dim or broadcastable to `x`, same device; multiply to enter FP8.
        fmt: E4M3 or E5M2.

    Returns:
        `fmt.dtype`, shape of `x`. Values beyond +-fmt.max (infinities too) become +-fmt.max; NaN stays NaN.
    """
    _check_scale(scale)
    x_fp8: Tensor = _ops.quantize(x, scale, fmt.torch_dtype, fmt.max)
    return x_fp8


def quantize_part(
    x: Tensor, grid: Tensor, start: int, num_cols: int, block: tuple[int, int], fmt: Float8Format
) -> Tensor:
    """`quantize` of a part of a flattened matrix [R, C] that has a scale for each block: what a ZeRO shard holds of it.

    Args:
        x: bf16, fp16 or fp32 [numel], contiguous: elements [start, start + numel) of the matrix.
        grid: float32 [ceil(R / block[0]), ceil(C / block[1])], contiguous; multiply to enter FP8.
        start: >= 0.
        num_cols: C.
        block: rows and columns that share a scale.
        fmt: E4M3 or E5M2.

    Returns:
        `fmt.dtype` [numel]; the bytes that the whole matrix would have there.

    Raises:
        ValueError: arguments other than these.
    """
    _check_scale(grid)
    if x.dim() != 1 or not x.is_contiguous() or start < 0 or num_cols < 1 or min(block) < 1:
        raise ValueError(
            f"x: expected a contiguous vector, start >= 0, columns and blocks >= 1, got {tuple(x.shape)}, {start}, "
            f"{num_cols}, {block}. Pass the shard without its padding."
        )
    expected = (-(-(start + x.numel()) // num_cols // block[0]), -(-num_cols // block[1]))
    if grid.dim() != 2 or not grid.is_contiguous() or len(grid) < expected[0] or grid.shape[1] != expected[1]:
        raise ValueError(
            f"grid: expected float32 with at least {expected[0]} rows of {expected[1]}, contiguous, got "
            f"{tuple(grid.shape)} with strides {grid.stride()}. Pass the scales of the whole matrix."
        )
    x_fp8: Tensor = _ops.quantize_part(x, grid, start, num_cols, *block, fmt.torch_dtype, fmt.max)
    return x_fp8


def quantize_tensorwise(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by the scale of its own amax (current scaling).

    Args:
        x: bf16, fp16 or fp32, any shape.
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8, scale_inv): `fmt.dtype` of the shape of `x`; float32, 0-dim, multiply to leave FP8, NaN if `x` holds a
        NaN or an infinity.
    """
    result: tuple[Tensor, Tensor] = _ops.quantize_tensorwise(x, fmt.torch_dtype, fmt.max)
    return result


def quantize_tensor_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """`quantize_tensorwise` by a power of two (scaling/pow2.py), for an operand that travels.

    Args:
        x: bf16, fp16 or fp32, any shape.
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8, scale_inv): as in `quantize_tensorwise`, but of zeros alone scale_inv is 2**-126.
    """
    result: tuple[Tensor, Tensor] = _ops.quantize_tensor_pow2(x, fmt.torch_dtype, fmt.max)
    return result


def quantize_delayed(
    x: Tensor, scale: Tensor, scale_inv: Tensor, amax_local: Tensor, fmt: Float8Format, *, record: bool
) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by a scale of the past; its amax is maximumed into `amax_local` if `record`.

    Args:
        x: bf16, fp16 or fp32, any shape.
        scale: float32, 0-dim; multiply to enter FP8.
        scale_inv: float32, 0-dim; its inverse.
        amax_local: float32, 0-dim, changed in place: a view of the slot in `AmaxHistory.amax_local`.
        fmt: E4M3 or E5M2.
        record: whether this use counts (training), or only reads the scale (evaluation).

    Returns:
        (x_fp8, scale_inv): as in `quantize_tensorwise`; the scale_inv is the one given, or NaN if `x` is not finite.
    """
    _check_scale(scale)
    dtype = fmt.torch_dtype
    result: tuple[Tensor, Tensor] = _ops.quantize_delayed(x, scale, scale_inv, amax_local, record, dtype, fmt.max)
    return result


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    """The amax of `x` is maximumed into `amax_local` (float32, 0-dim), and nothing else happens."""
    _ops.record_amax(x, amax_local)


def quantize_planes(x: Tensor, scale: Tensor, fmt: Float8Format, planes: Planes) -> tuple[Tensor | None, Tensor | None]:
    """`quantize` in one or both layouts, in one read of `x`.

    Args:
        x: bf16, fp16 or fp32, [T, C], contiguous. Fast where T and C are multiples of 16.
        scale: float32, 0-dim, same device; multiply to enter FP8.
        fmt: E4M3 or E5M2.
        planes: "row", "col" or "both".

    Returns:
        (x_fp8, x_fp8_t): `fmt.dtype`, contiguous, [T, C] and [C, T]; None for the one that `planes` does not name.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_scalar("scale", scale)
    _check_planes(planes)
    row_plane, col_plane = _ops.quantize_planes(x, scale, fmt.torch_dtype, fmt.max, planes)
    return _named(row_plane, col_plane, planes)


def quantize_tensorwise_planes(
    x: Tensor, fmt: Float8Format, planes: Planes
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`quantize_tensorwise` in one or both layouts: two reads of `x`, one for its amax.

    Args: as in `quantize_planes`.

    Returns:
        (x_fp8, x_fp8_t, scale_inv): the planes as in `quantize_planes`; scale_inv as in `quantize_tensorwise`.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_planes(planes)
    row_plane, col_plane, scale_inv = _ops.quantize_tensorwise_planes(x, fmt.torch_dtype, fmt.max, planes)
    return (*_named(row_plane, col_plane, planes), scale_inv)


def quantize_delayed_planes(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    amax_local: Tensor,
    fmt: Float8Format,
    planes: Planes,
    *,
    record: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`quantize_delayed` in one or both layouts, in one read of `x`.

    Args: as in `quantize_delayed` and `quantize_planes`.

    Returns:
        (x_fp8, x_fp8_t, scale_inv): the planes as in `quantize_planes`; scale_inv as in `quantize_delayed`.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_scalar("scale", scale)
    _check_planes(planes)
    row_plane, col_plane, scale_inv = _ops.quantize_delayed_planes(
        x, scale, scale_inv, amax_local, record, fmt.torch_dtype, fmt.max, planes
    )
    return (*_named(row_plane, col_plane, planes), scale_inv)


def quantize_measured_planes(
    x: Tensor, scale: Tensor, scale_inv: Tensor, fmt: Float8Format, planes: Planes
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """`quantize_delayed_planes` that returns the amax and writes nothing else: in a graph, equal calls are made once.

    Returns:
        (x_fp8, x_fp8_t, scale_inv, amax): amax float32, 0-dim.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_scalar("scale", scale)
    _check_planes(planes)
    row_plane, col_plane, scale_inv, amax = _ops.quantize_measured_planes(
        x, scale, scale_inv, fmt.torch_dtype, fmt.max, planes
    )
    return (*_named(row_plane, col_plane, planes), scale_inv, amax)


def quantize_rowwise(x: Tensor, fmt: Float8Format, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x` in FP8 by one scale for each row, from that row's amax; one read of `x` up to 16384 columns, else two.

    Args:
        x: bf16, fp16 or fp32, [T, C], contiguous. Fast where C is a multiple of 16.
        fmt: E4M3 or E5M2.
        fold: float32 [C] or [C, 1], multiplied into `x` in float32 before anything else, or None. The next GEMM
            contracts C: a scale_inv of its other operand that varies along C cannot be applied to its output, but here.

    Returns:
        (x_fp8, scale_inv): `fmt.dtype` [T, C]; float32 [T, 1], multiply to leave FP8, NaN for a row that holds a NaN
        or an infinity, 1 for a row of zeros.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_fold(fold, x.shape[1])
    result: tuple[Tensor, Tensor] = _ops.quantize_rowwise(x, fold, fmt.torch_dtype, fmt.max)
    return result


def quantize_colwise_t(x: Tensor, fmt: Float8Format, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x.T` in FP8 by one scale for each of its rows, which are columns of `x`; two reads of `x`.

    Args:
        x: bf16, fp16 or fp32, [T, C], contiguous. Fast where T and C are multiples of 16.
        fmt: E4M3 or E5M2.
        fold: float32 [T] or [T, 1], multiplied into `x` as in `quantize_rowwise`, or None.

    Returns:
        (x_fp8_t, scale_inv): `fmt.dtype` [C, T], contiguous; float32 [C, 1], as in `quantize_rowwise`.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_fold(fold, x.shape[0])
    result: tuple[Tensor, Tensor] = _ops.quantize_colwise_t(x, fold, fmt.torch_dtype, fmt.max)
    return result
