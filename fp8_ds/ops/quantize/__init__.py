"""High precision to FP8: `x_fp8 = cast(x * scale)`, saturating; `x ~ x_fp8 * scale_inv`.

Infinities saturate in the cast, as in the hardware's saturating conversion. Where the amax is at hand (tensorwise and
delayed) a non-finite input therefore makes scale_inv NaN, and so everything that is de-quantised with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops._register import register
from fp8_ds.ops.quantize import reference

_KEEP: list[torch.library.Library] = []
"""Library handles; the ops live as long as these."""


def _scalar(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fake_tensorwise(x: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    return _fp8(x, dtype), _scalar(x)


def _fake_delayed(
    x: Tensor, scale: Tensor, scale_inv: Tensor, amax_local: Tensor, record: bool, dtype: torch.dtype, fp8_max: float
) -> tuple[Tensor, Tensor]:
    return _fp8(x, dtype), _scalar(x)


_amax, _handle = register("amax(Tensor x) -> Tensor", reference.amax, _scalar)
_KEEP.append(_handle)
_quantize, _handle = register(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, float fp8_max) -> Tensor",
    reference.quantize,
    lambda x, scale, dtype, fp8_max: _fp8(x, dtype),
)
_KEEP.append(_handle)
_quantize_tensorwise, _handle = register(
    "quantize_tensorwise(Tensor x, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_tensorwise,
    _fake_tensorwise,
)
_KEEP.append(_handle)
_quantize_delayed, _handle = register(
    "quantize_delayed(Tensor x, Tensor scale, Tensor scale_inv, Tensor(a!) amax_local, bool record, "
    "ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.quantize_delayed,
    _fake_delayed,
)
_KEEP.append(_handle)
_record_amax, _handle = register(
    "record_amax(Tensor x, Tensor(a!) amax_local) -> ()", reference.record_amax, lambda x, amax_local: None
)
_KEEP.append(_handle)


def _dtype_of(fmt: Float8Format) -> torch.dtype:
    if fmt.dtype is None:
        raise ValueError(f"format: expected one with a torch dtype, got {fmt.name}. Use E4M3 or E5M2.")
    return fmt.dtype


def _check_scale(scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise ValueError(f"scale: expected float32, got {scale.dtype}. Scales are kept in float32 throughout.")


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` in one read.

    Args:
        x: bf16, fp16 or fp32, any shape and layout.

    Returns:
        float32, 0-dim; 0 for an empty tensor; NaN or infinity if `x` holds one.
    """
    measured: Tensor = _amax(x)
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
    x_fp8: Tensor = _quantize(x, scale, _dtype_of(fmt), fmt.max)
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
    result: tuple[Tensor, Tensor] = _quantize_tensorwise(x, _dtype_of(fmt), fmt.max)
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
    dtype = _dtype_of(fmt)
    result: tuple[Tensor, Tensor] = _quantize_delayed(x, scale, scale_inv, amax_local, record, dtype, fmt.max)
    return result


def record_amax(x: Tensor, amax_local: Tensor) -> None:
    """The amax of `x` is maximumed into `amax_local` (float32, 0-dim), and nothing else happens."""
    _record_amax(x, amax_local)
