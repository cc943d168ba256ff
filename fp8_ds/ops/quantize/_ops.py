"""The ops of `fp8_ds.ops.quantize` as torch knows them: schemas, shapes of what they return, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8_ds.ops._register import register
from fp8_ds.ops.quantize import reference

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_KEEP: list[torch.library.Library] = []
"""Library handles; the ops live as long as these."""


def _scalar(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fp8_t(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


def _fp8_planes(x: Tensor, dtype: torch.dtype, planes: str) -> tuple[Tensor, Tensor]:
    none = x.new_empty(0, dtype=dtype)
    return none if planes == "col" else _fp8(x, dtype), none if planes == "row" else _fp8_t(x, dtype)


def _fake_tensorwise(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    return _fp8(x, dtype), _scalar(x)


def _op(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The op of that schema: on CUDA the function of its name in triton.py, else that in reference.py."""
    name = schema.split("(", 1)[0]
    plain = getattr(reference, name)

    def kernel(x: Tensor, *args: Any) -> Any:
        takes_kernel = x.is_contiguous() and x.dtype in KERNEL_DTYPES and (name != "quantize" or args[0].dim() == 0)
        if not (x.is_cuda and takes_kernel):
            return plain(x, *args)
        from fp8_ds.ops.quantize import triton  # the package is missing where there is no GPU

        with torch.cuda.device_of(x):  # Triton launches on the current device
            return getattr(triton, name)(x, *args)

    op, library = register(schema, kernel, fake)
    _KEEP.append(library)
    return op


amax = _op("amax(Tensor x) -> Tensor", _scalar)
record_amax = _op("record_amax(Tensor x, Tensor(a!) amax_local) -> ()", lambda x, amax_local: None)
quantize = _op(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, float fp8_max) -> Tensor",
    lambda x, scale, dtype, fp8_max: _fp8(x, dtype),
)
quantize_part = _op(
    "quantize_part(Tensor x, Tensor grid, SymInt start, SymInt num_cols, SymInt block_rows, SymInt block_cols, "
    "ScalarType dtype, float fp8_max) -> Tensor",
    lambda x, grid, start, num_cols, block_rows, block_cols, dtype, fp8_max: _fp8(x, dtype),
)
quantize_tensorwise = _op(
    "quantize_tensorwise(Tensor x, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)", _fake_tensorwise
)
quantize_tensor_pow2 = _op(
    "quantize_tensor_pow2(Tensor x, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)", _fake_tensorwise
)
quantize_delayed = _op(
    "quantize_delayed(Tensor x, Tensor scale, Tensor scale_inv, Tensor(a!) amax_local, bool record, "
    "ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    lambda x, scale, scale_inv, amax_local, record, dtype, fp8_max: (_fp8(x, dtype), _scalar(x)),
)
quantize_planes = _op(
    "quantize_planes(Tensor x, Tensor scale, ScalarType dtype, float fp8_max, str planes) -> (Tensor, Tensor)",
    lambda x, scale, dtype, fp8_max, planes: _fp8_planes(x, dtype, planes),
)
quantize_tensorwise_planes = _op(
    "quantize_tensorwise_planes(Tensor x, ScalarType dtype, float fp8_max, str planes) -> (Tensor, Tensor, Tensor)",
    lambda x, dtype, fp8_max, planes: (*_fp8_planes(x, dtype, planes), _scalar(x)),
)
quantize_delayed_planes = _op(
    "quantize_delayed_planes(Tensor x, Tensor scale, Tensor scale_inv, Tensor(a!) amax_local, bool record, "
    "ScalarType dtype, float fp8_max, str planes) -> (Tensor, Tensor, Tensor)",
    lambda x, scale, scale_inv, amax_local, record, dtype, fp8_max, planes: (
        *_fp8_planes(x, dtype, planes),
        _scalar(x),
    ),
)
quantize_rowwise = _op(
    "quantize_rowwise(Tensor x, Tensor? fold, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    lambda x, fold, dtype, fp8_max: (_fp8(x, dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)),
)
quantize_colwise_t = _op(
    "quantize_colwise_t(Tensor x, Tensor? fold, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    lambda x, fold, dtype, fp8_max: (_fp8_t(x, dtype), x.new_empty((x.shape[1], 1), dtype=torch.float32)),
)


def _quantize_parts(
    xs: list[Tensor],
    outs: list[Tensor],
    grids: list[Tensor],
    cuts: list[int],
    table: Tensor,
    program_parts: Tensor,
    has_one_scale: bool,
    is_vector: bool,
    fp8_max: float,
) -> None:
    if not table.is_cuda:
        reference.quantize_parts(xs, outs, grids, cuts, fp8_max)
        return
    from fp8_ds.ops.quantize import triton  # the package is missing where there is no GPU

    with torch.cuda.device_of(table):  # Triton launches on the current device
        triton.quantize_parts(xs, outs, grids, cuts, table, program_parts, has_one_scale, is_vector, fp8_max)


quantize_parts, _library = register(
    "quantize_parts(Tensor[] xs, Tensor(a!)[] outs, Tensor[] grids, int[] cuts, Tensor table, Tensor program_parts, "
    "bool has_one_scale, bool is_vector, float fp8_max) -> ()",
    _quantize_parts,
    lambda xs, outs, grids, cuts, table, program_parts, has_one_scale, is_vector, fp8_max: None,
)
_KEEP.append(_library)


def _measured_planes(
    x: Tensor, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype, fp8_max: float, planes: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amax_local = torch.zeros((), dtype=torch.float32, device=x.device)
    return (*quantize_delayed_planes(x, scale, scale_inv, amax_local, True, dtype, fp8_max, planes), amax_local)


quantize_measured_planes, _library = register(
    "quantize_measured_planes(Tensor x, Tensor scale, Tensor scale_inv, ScalarType dtype, float fp8_max, "
    "str planes) -> (Tensor, Tensor, Tensor, Tensor)",
    _measured_planes,
    lambda x, scale, scale_inv, dtype, fp8_max, planes: (*_fp8_planes(x, dtype, planes), _scalar(x), _scalar(x)),
)
_KEEP.append(_library)
