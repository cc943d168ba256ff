"""SwiGLU and its gradients in plain torch, slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._producer import SlotTensors, empty_amax, quantize_by
from fp8_ds.ops.blockwise.reference import dequantize_groupwise
from fp8_ds.ops.transpose import transpose_reference

SixTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def hidden(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`, bf16 [T, F], rounded before the product and after it."""
    wide = gate.float()
    return (_round(wide * _sigmoid(wide)) * up.float()).bfloat16()


def swiglu(
    gate: Tensor,
    up: Tensor,
    mode: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax_local: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x_fp8, scale_inv, hp, amax); hp is empty unless `with_hp`, amax unless the mode is tensorwise."""
    hp = hidden(gate, up)
    amax = empty_amax(mode, hp)
    if mode == "tensorwise":
        amax.copy_(hp.abs().amax() if hp.numel() else amax.new_zeros(()))
    x_fp8, scale_inv = quantize_by(hp, mode, SlotTensors(scale, scale_inv, amax_local), dtype, fp8_max)
    return x_fp8, scale_inv, hp if with_hp else hp.new_empty(0), amax


def _factors(gate: Tensor, up: Tensor, gate_kept: Tensor | None, up_kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up, bf16 [T, F]; with scales they are codes."""
    if gate_kept is None or up_kept is None:
        return gate, up
    return dequantize_groupwise(gate, gate_kept), dequantize_groupwise(up, up_kept)


def swiglu_columns(
    gate: Tensor,
    up: Tensor,
    gate_kept: Tensor | None,
    up_kept: Tensor | None,
    mode: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
) -> tuple[Tensor, Tensor]:
    """Return (x_fp8 transposed, scale_inv); nothing is recorded, and `amax` is measured again."""
    factors = _factors(gate, up, gate_kept, up_kept)
    x_fp8, found, *_ = swiglu(*factors, mode, scale, scale_inv, None, dtype, fp8_max, False)
    return transpose_reference(x_fp8), found


def gradients(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate, grad_up), bf16 [T, F], rounded where autograd of the bf16 module rounds."""
    grad, wide = grad_hidden.float(), gate.float()
    sigmoid = _sigmoid(wide)
    grad_up = grad * _round(wide * sigmoid)
    grad_silu = _round(grad * up.float())
    grad_gate = (grad_silu * sigmoid) * (1 + wide * (1 - sigmoid))
    return grad_gate.bfloat16(), grad_up.bfloat16()


def empty_gradients(gate: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Allocate bf16: two of the shape of `gate`, or, if `packed`, [T, 2F] and one without elements."""
    num_rows, num_cols = gate.shape
    shapes = [(num_rows, 2 * num_cols), (0,)] if packed else [(num_rows, num_cols)] * 2
    first, second = (torch.empty(shape, dtype=torch.bfloat16, device=gate.device) for shape in shapes)
    return first, second


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Return (grad_gate, grad_up), or ([T, 2F], no elements) if `packed`."""
    grad_gate, grad_up = gradients(grad_hidden, gate, up)
    return (torch.cat([grad_gate, grad_up], dim=1), grad_up.new_empty(0)) if packed else (grad_gate, grad_up)


def swiglu_backward_to_fp8(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    mode: str,
    gate_scale: Tensor | None,
    gate_scale_inv: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_scale_inv: Tensor | None,
    up_amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    with_hp: bool,
) -> SixTensors:
    """Return x_fp8, scale_inv and hp (without elements unless `with_hp`) of grad_gate, then of grad_up."""
    grad_gate, grad_up = gradients(grad_hidden, gate, up)
    of_gate = quantize_by(grad_gate, mode, SlotTensors(gate_scale, gate_scale_inv, gate_amax), dtype, fp8_max)
    of_up = quantize_by(grad_up, mode, SlotTensors(up_scale, up_scale_inv, up_amax), dtype, fp8_max)
    hps = (grad_gate, grad_up) if with_hp else (gate.new_empty(0), gate.new_empty(0))
    return *of_gate, hps[0], *of_up, hps[1]


def swiglu_backward_and_columns(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_kept: Tensor | None,
    up_kept: Tensor | None,
    mode: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    gate_scale: Tensor | None,
    gate_scale_inv: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_scale_inv: Tensor | None,
    up_amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    grad_dtype: torch.dtype,
    grad_max: float,
) -> SixTensors:
    """Return (x_fp8 transposed, scale_inv) of the product, then (x_fp8, scale_inv) of grad_gate and of grad_up.

    With `gate_kept` there are no columns, because `swiglu_columns` reads codes by itself. Tensorwise, the amax of the
    product then takes the place of their scale_inv.
    """
    gate, up = _factors(gate, up, gate_kept, up_kept)
    if gate_kept is None:
        columns = swiglu_columns(gate, up, None, None, mode, scale, scale_inv, amax, dtype, fp8_max)
    else:
        measured = hidden(gate, up).abs().amax() if mode == "tensorwise" and gate.numel() else gate.new_zeros(())
        columns = gate.new_empty((0, gate.shape[0]), dtype=dtype), measured.float()
    slots = gate_scale, gate_scale_inv, gate_amax, up_scale, up_scale_inv, up_amax
    found = swiglu_backward_to_fp8(grad_hidden, gate, up, mode, *slots, grad_dtype, grad_max, False)
    return *columns, *found[:2], *found[3:5]
