"""Scaling of the FP8 output of the fused producers (RMSNorm, SwiGLU): types, checks and plain torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8_ds.numerics.scale import AmaxSlot, row_scale_from_amax
from fp8_ds.ops.quantize import reference as quantize_reference

Scaling = AmaxSlot | Literal["rowwise", "tensorwise"]
"""An AmaxSlot scales by what the slot holds (delayed), and its amax_local takes the maximum. "rowwise" scales each row
by its own amax, in one pass; "tensorwise" the whole by its own amax, in two passes over the inputs."""


class Fp8Output(NamedTuple):
    """A producer's output: `hp ~ x_fp8 * scale_inv`.

    Args:
        x_fp8: [T, C], contiguous: `hp` quantised.
        scale_inv: float32, multiply to leave FP8; 0-dim, or [T, 1] if rowwise. NaN where the amax is not finite.
        hp: bf16 [T, C], contiguous, or None if it was not asked for.
    """

    x_fp8: Tensor
    scale_inv: Tensor
    hp: Tensor | None


class SlotTensors(NamedTuple):
    """Tensors of an AmaxSlot, or of none, for an op's schema. `amax_local` is None where nothing is recorded: a graph
    would take the argument for written."""

    scale: Tensor | None
    scale_inv: Tensor | None
    amax_local: Tensor | None


def mode_of(scaling: Scaling, record: bool = True) -> tuple[str, SlotTensors]:
    """Return `scaling` as the mode and the tensors of an op's schema.

    Args:
        record: whether a slot's amax_local takes the maximum (training), or is left (evaluation).

    Raises:
        ValueError: `scaling` is neither a slot nor one of the two words.
    """
    if isinstance(scaling, AmaxSlot):
        return "given", SlotTensors(scaling.scale, scaling.scale_inv, scaling.amax_local if record else None)
    if scaling not in ("rowwise", "tensorwise"):
        raise ValueError(
            f"scaling: expected an AmaxSlot, 'rowwise' or 'tensorwise', got {scaling!r}. Use one of these."
        )
    return scaling, SlotTensors(None, None, None)


def check_rows(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Refuse all but bf16 [T, C] of the shape of `like` whose rows are contiguous."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or (like is not None and x.shape != like.shape):
        expected = "[T, C]" if like is None else str(tuple(like.shape))
        raise ValueError(f"{name}: expected bfloat16 {expected}, got {x.dtype} {tuple(x.shape)}. Cast or reshape it.")
    if torch.Tensor.stride(x, 1) != 1 and x.shape[1] > 1:
        raise ValueError(
            f"{name}: expected rows without gaps (any stride between them), got strides {x.stride()}. "
            "Pass x.contiguous()."
        )


def empty_output(like: Tensor, mode: str, dtype: torch.dtype, with_hp: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate x_fp8, scale_inv and hp (without elements if not asked for) for `like` [T, C]."""
    scale_inv_shape = (like.shape[0], 1) if mode == "rowwise" else ()
    return (
        torch.empty(like.shape, dtype=dtype, device=like.device),
        torch.empty(scale_inv_shape, dtype=torch.float32, device=like.device),
        torch.empty(like.shape if with_hp else (0,), dtype=torch.bfloat16, device=like.device),
    )


def empty_amax(mode: str, like: Tensor) -> Tensor:
    """Allocate float32 for an amax that the op measures: 0-dim if "tensorwise", else without elements."""
    return torch.empty(() if mode == "tensorwise" else (0,), dtype=torch.float32, device=like.device)


def quantize_by(hp: Tensor, mode: str, slot: SlotTensors, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return (x_fp8, scale_inv) of bf16 [T, C] in plain torch: the reference of each kernel's last step."""
    if mode == "tensorwise":
        return quantize_reference.quantize_tensorwise(hp, dtype, fp8_max)
    if mode == "given":
        assert slot.scale is not None and slot.scale_inv is not None
        record = slot.amax_local is not None
        amax_local = slot.amax_local if slot.amax_local is not None else hp.new_zeros((), dtype=torch.float32)
        return quantize_reference.quantize_delayed(hp, slot.scale, slot.scale_inv, amax_local, record, dtype, fp8_max)
    amax = hp.abs().amax(dim=1, keepdim=True) if hp.numel() else hp.new_zeros(hp.shape[0], 1)
    scale, scale_inv = row_scale_from_amax(amax, fp8_max)
    return quantize_reference.quantize(hp, scale, dtype, fp8_max), scale_inv
