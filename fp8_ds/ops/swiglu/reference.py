"""SwiGLU and its gradients in plain torch, slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._producer import SlotTensors, empty_amax, quantize_by
from fp8_ds.ops.groupwise.reference import dequantize_groupwise
from fp8_ds.ops.transpose.reference import transpose


def _round(x: Tensor, rounds: bool) -> Tensor:
    return x.bfloat16().float() if rounds else x


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def hidden(gate: Tensor, up: Tensor, twice: bool) -> Tensor:
    """bf16 [T, F]: `silu(gate) * up` in float32, rounded at the end, or also before the product."""
    wide = gate.float()
    return (_round(wide * _sigmoid(wide), twice) * up.float()).bfloat16()


def swiglu(
    gate: Tensor,
    up: Tensor,
    mode: str,
    slot: SlotTensors,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_fp8, scale_inv, hp, amax); the last is of no elements unless the mode is tensorwise."""
    hp = hidden(gate, up, twice)
    amax = empty_amax(mode, hp)
    if mode == "tensorwise":
        amax.copy_(hp.abs().amax() if hp.numel() else amax.new_zeros(()))
    return *quantize_by(hp, mode, slot, record, dtype, fp8_max), hp, amax


def factors(gate: Tensor, up: Tensor, kept_scales: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """bf16 [T, F] of gate and of up; with scales they are codes."""
    if kept_scales is None:
        return gate, up
    return dequantize_groupwise(gate, kept_scales[0]), dequantize_groupwise(up, kept_scales[1])


def swiglu_columns(
    gate: Tensor, up: Tensor, mode: str, slot: SlotTensors, dtype: torch.dtype, fp8_max: float, twice: bool
) -> tuple[Tensor, Tensor]:
    """(x_fp8 transposed, scale_inv); nothing is recorded."""
    x_fp8, scale_inv, _, _ = swiglu(gate, up, mode, slot, False, dtype, fp8_max, twice)
    return transpose(x_fp8), scale_inv


def gradients(grad_hidden: Tensor, gate: Tensor, up: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
    """(grad_gate, grad_up), bf16 [T, F]; `twice` rounds where autograd of the bf16 module does."""
    grad, wide = grad_hidden.float(), gate.float()
    sigmoid = _sigmoid(wide)
    grad_up = grad * _round(wide * sigmoid, twice)
    grad_silu = _round(grad * up.float(), twice)
    grad_gate = (grad_silu * sigmoid) * (1 + wide * (1 - sigmoid))
    return grad_gate.bfloat16(), grad_up.bfloat16()


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, twice: bool) -> tuple[Tensor, Tensor]:
    """(grad_gate, grad_up), or ([T, 2F], no elements) if `packed`."""
    grad_gate, grad_up = gradients(grad_hidden, gate, up, twice)
    return (torch.cat([grad_gate, grad_up], dim=1), grad_up.new_empty(0)) if packed else (grad_gate, grad_up)


def swiglu_backward_to_fp8(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    packed: bool,
    mode: str,
    slots: tuple[SlotTensors, SlotTensors],
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x_fp8, scale_inv, hp) of grad_gate and of grad_up, or of both in one if `packed`."""
    hps = swiglu_backward(grad_hidden, gate, up, packed, twice)[: 1 if packed else 2]
    return [(*quantize_by(hp, mode, slot, record, dtype, fp8_max), hp) for hp, slot in zip(hps, slots, strict=False)]
