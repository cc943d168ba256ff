"""Quantisation of high precision to FP8: `x_fp8 = cast(x * scale)`, saturating; `x ~ x_fp8 * scale_inv`.

Infinities saturate in the cast, as in the hardware's saturating conversion. Where the amax is at hand (all but
`quantize` and `quantize_part`) a non-finite input therefore makes scale_inv NaN, and so everything that is
de-quantised with it. NaN stays NaN; its sign is not kept.

Hopper's FP8 GEMM contracts the last dim of both operands, so one matrix is wanted in two layouts by the GEMMs of a
linear. Functions with `layout` make "row", the layout of `x`, "col", its transpose, or "both" in one read.

CUDA runs the kernels of triton.py. Plain torch casts there what they do not take and only the functions without a
matrix's shape in their arguments allow: tensors that are not contiguous or float64, and scales that are not 0-dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.numerics.formats import Float8Format
from fp8_ds.ops._register import is_on_cuda, register, register_pair
from fp8_ds.ops.quantize import reference

Layout = Literal["row", "col", "both"]
LAYOUTS: tuple[Layout, ...] = ("row", "col", "both")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _scalar(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fp8_t(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _fp8_layouts(x: Tensor, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """Allocate both layouts; one that `layout` does not name has no elements."""
    none = x.new_empty(0, dtype=dtype)
    return none if layout == "col" else _fp8(x, dtype), none if layout == "row" else _fp8_t(x, dtype)


def _use_triton(x: Tensor, *_: Any) -> bool:
    return is_on_cuda(x) and x.is_contiguous() and x.dtype in KERNEL_DTYPES


def _op(schema: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    return register_pair(schema, plain, fake, use_triton=_use_triton)


_record_amax = _op(
    "record_amax(Tensor x, Tensor(a!) amax_local) -> ()", reference.record_amax, lambda x, amax_local: None
)
_quantize = register_pair(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, float fp8_max) -> Tensor",
    reference.quantize,
    lambda x, scale, dtype, fp8_max: _fp8(x, dtype),
    use_triton=lambda x, scale, *_: _use_triton(x) and scale.dim() == 0,
)
_quantize_part = _op(
    "quantize_part(Tensor x, Tensor grid, SymInt start, SymInt num_cols, SymInt block_rows, SymInt block_cols, "
    "ScalarType dtype, float fp8_max) -> Tensor",
    reference.quantize_part,
    lambda x, grid, start, num_cols, block_rows, block_cols, dtype, fp8_max: _fp8(x, dtype),
)
_quantize_parts = register_pair(
    "quantize_parts(Tensor table, Tensor program_parts, Tensor[] xs, Tensor(a!)[] outs, Tensor[] grids, int[] places, "
    "bool has_one_scale, bool is_vector, float fp8_max) -> ()",
    reference.quantize_parts,
    lambda *_: None,
)
_quantize_tensorwise = _op(
    "quantize_tensorwise(Tensor x, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_tensorwise,
    lambda x, dtype, fp8_max: (_fp8(x, dtype), _scalar(x)),
)
_quantize_tensor_pow2 = _op(
    "quantize_tensor_pow2(Tensor x, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_tensor_pow2,
    lambda x, dtype, fp8_max: (_fp8(x, dtype), _scalar(x)),
)
_quantize_and_transpose_tensorwise = _op(
    "quantize_and_transpose_tensorwise(Tensor x, ScalarType dtype, float fp8_max, str layout) "
    "-> (Tensor, Tensor, Tensor)",
    reference.quantize_and_transpose_tensorwise,
    lambda x, dtype, fp8_max, layout: (*_fp8_layouts(x, dtype, layout), _scalar(x)),
)
_quantize_and_transpose_delayed = _op(
    "quantize_and_transpose_delayed(Tensor x, Tensor scale, Tensor scale_inv, Tensor(a!) amax_local, bool record, "
    "ScalarType dtype, float fp8_max, str layout) -> (Tensor, Tensor, Tensor)",
    reference.quantize_and_transpose_delayed,
    lambda x, scale, scale_inv, amax_local, record, dtype, fp8_max, layout: (
        *_fp8_layouts(x, dtype, layout),
        _scalar(x),
    ),
)
_quantize_rowwise = _op(
    "quantize_rowwise(Tensor x, Tensor? fold, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_rowwise,
    lambda x, fold, dtype, fp8_max: (_fp8(x, dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)),
)
_quantize_colwise_t = _op(
    "quantize_colwise_t(Tensor x, Tensor? fold, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_colwise_t,
    lambda x, fold, dtype, fp8_max: (_fp8_t(x, dtype), x.new_empty((x.shape[1], 1), dtype=torch.float32)),
)


def _measured(
    x: Tensor, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype, fp8_max: float, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amax_local = torch.zeros((), dtype=torch.float32, device=x.device)
    return (*_quantize_and_transpose_delayed(x, scale, scale_inv, amax_local, True, dtype, fp8_max, layout), amax_local)


_quantize_and_transpose_measured = register(
    "quantize_and_transpose_measured(Tensor x, Tensor scale, Tensor scale_inv, ScalarType dtype, float fp8_max, "
    "str layout) -> (Tensor, Tensor, Tensor, Tensor)",
    _measured,
    lambda x, scale, scale_inv, dtype, fp8_max, layout: (*_fp8_layouts(x, dtype, layout), _scalar(x), _scalar(x)),
)


def _check_scale(scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise ValueError(f"scale: expected float32, got {scale.dtype}. Scales are kept in float32 throughout.")


def _check_matrix(x: Tensor) -> None:
    if x.dim() != 2 or not torch.Tensor.is_contiguous(x) or x.dtype not in KERNEL_DTYPES:
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


def check_layout(layout: str) -> None:
    """Refuse all but the names of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}. Use one of these.")


def _named(x_fp8: Tensor, x_fp8_t: Tensor, layout: str) -> tuple[Tensor | None, Tensor | None]:
    return None if layout == "col" else x_fp8, None if layout == "row" else x_fp8_t


def quantize(x: Tensor, scale: Tensor, fmt: Float8Format) -> Tensor:
    """Quantize `x` by a scale that is already known.

    It is elementwise: shards of `x` quantised by the same scale have the same bytes as `x` quantised whole.

    Args:
        x: bf16, fp16 or fp32, any shape.
        scale: float32, 0-dim or broadcastable to `x`, same device; multiply to enter FP8.
        fmt: E4M3 or E5M2.

    Returns:
        `fmt.dtype`, shape of `x`. Values beyond +-fmt.max (infinities too) become +-fmt.max; NaN stays NaN.
    """
    _check_scale(scale)
    return _quantize(x, scale, fmt.torch_dtype, fmt.max)


def quantize_part(
    x: Tensor, grid: Tensor, start: int, num_cols: int, block: tuple[int, int], fmt: Float8Format
) -> Tensor:
    """Quantize a part of a flattened matrix [R, C] that has a scale for each block, such as a ZeRO shard.

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
    return _quantize_part(x, grid, start, num_cols, *block, fmt.torch_dtype, fmt.max)


def quantize_tensorwise(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """Quantize `x` by the scale of its own amax (current scaling).

    Args:
        x: bf16, fp16 or fp32, any shape.
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8, scale_inv): `fmt.dtype` of the shape of `x`; float32, 0-dim, multiply to leave FP8, NaN if `x` holds a
        NaN or an infinity.
    """
    return _quantize_tensorwise(x, fmt.torch_dtype, fmt.max)


def quantize_tensor_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """Quantize `x` as `quantize_tensorwise`, by a power of two (numerics/scale.py), for an operand sent between ranks.

    Args:
        x: bf16, fp16 or fp32, any shape.
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8, scale_inv): as in `quantize_tensorwise`, but of zeros alone scale_inv is 2**-126.
    """
    return _quantize_tensor_pow2(x, fmt.torch_dtype, fmt.max)


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    """Raise `amax_local` (float32, 0-dim) to the amax of `x`, in place."""
    _record_amax(x, amax_local)


def quantize_and_transpose_tensorwise(
    x: Tensor, fmt: Float8Format, layout: Layout
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize `x` by the scale of its own amax in one or both layouts: two reads of `x`, one for its amax.

    Args:
        x: bf16, fp16 or fp32, [T, C], contiguous. Fast where T and C are multiples of 16.
        fmt: E4M3 or E5M2.
        layout: "row", "col" or "both".

    Returns:
        (x_fp8, x_fp8_t, scale_inv): `fmt.dtype`, contiguous, [T, C] and [C, T], None for the one that `layout` does not
        name; scale_inv as in `quantize_tensorwise`.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    check_layout(layout)
    x_fp8, x_fp8_t, scale_inv = _quantize_and_transpose_tensorwise(x, fmt.torch_dtype, fmt.max, layout)
    return (*_named(x_fp8, x_fp8_t, layout), scale_inv)


def quantize_and_transpose_delayed(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    amax_local: Tensor,
    fmt: Float8Format,
    layout: Layout,
    *,
    record: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize `x` in one or both layouts by a given scale; `amax_local` takes the maximum with its amax if `record`.

    Args: as in `quantize_and_transpose_tensorwise`, and
        scale: float32, 0-dim; multiply to enter FP8.
        scale_inv: float32, 0-dim; its inverse.
        amax_local: float32, 0-dim, changed in place: a view of the slot in `AmaxHistory.amax_local`.
        record: whether this use counts (training), or only reads the scale (evaluation).

    Returns:
        (x_fp8, x_fp8_t, scale_inv): as there; the scale_inv is the one given, or NaN if `x` is not finite.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_scalar("scale", scale)
    check_layout(layout)
    x_fp8, x_fp8_t, scale_inv = _quantize_and_transpose_delayed(
        x, scale, scale_inv, amax_local, record, fmt.torch_dtype, fmt.max, layout
    )
    return (*_named(x_fp8, x_fp8_t, layout), scale_inv)


def quantize_and_transpose_measured(
    x: Tensor, scale: Tensor, scale_inv: Tensor, fmt: Float8Format, layout: Layout
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Quantize as `quantize_and_transpose_delayed`, but return the amax instead: a graph merges equal calls.

    Returns:
        (x_fp8, x_fp8_t, scale_inv, amax): amax float32, 0-dim.

    Raises:
        ValueError: arguments other than these.
    """
    _check_matrix(x)
    _check_scalar("scale", scale)
    check_layout(layout)
    x_fp8, x_fp8_t, scale_inv, amax = _quantize_and_transpose_measured(
        x, scale, scale_inv, fmt.torch_dtype, fmt.max, layout
    )
    return (*_named(x_fp8, x_fp8_t, layout), scale_inv, amax)


def quantize_rowwise(x: Tensor, fmt: Float8Format, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `x` rowwise, each row by its own amax; one read of `x` up to 16384 columns, else two.

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
    return _quantize_rowwise(x, fold, fmt.torch_dtype, fmt.max)


def quantize_colwise_t(x: Tensor, fmt: Float8Format, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `x.T` rowwise: one scale for each of its rows, which are columns of `x`; two reads of `x`.

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
    return _quantize_colwise_t(x, fold, fmt.torch_dtype, fmt.max)
