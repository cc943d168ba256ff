"""SwiGLU and its gradients by the Triton kernels: inputs read once (tensorwise: twice), bf16 written if asked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fp8_ds.ops._device import AMAX, FROM_AMAX, GIVEN, ROWWISE, runs_ptx
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops._producer import SlotTensors, empty_amax, empty_output
from fp8_ds.ops._tiles import as_words, num_tiles, tile_options
from fp8_ds.ops.swiglu.columns_kernel import swiglu_backward_and_columns_kernel, swiglu_columns_kernel
from fp8_ds.ops.swiglu.kernel import BF16, swiglu_backward_kernel, swiglu_kernel
from fp8_ds.ops.swiglu.reference import SixTensors, empty_gradients

_MODES = {"given": [GIVEN], "rowwise": [ROWWISE], "tensorwise": [AMAX, FROM_AMAX]}
_BLOCK = 2048
"""Columns of a program, where it needs no whole row."""

_MAX_ROW, _LONG_ROW_BLOCK = 16384, 8192
"""Longest row that stays in registers; a longer one is taken in blocks of the second size, twice (again from L2)."""

_COLUMNS_QUARTER, _COLUMNS_WARPS = 16, 8
"""Launch of a program that writes columns: a quarter of its rows (ops/_tiles.py), and its warps. Both layouts of the
gradients from one read were no faster on an H200 than rows and a transpose (measured on 2026-11-23)."""
_KEPT_QUARTER, _KEPT_WARPS = 8, 4
"""The same where gate and up are kept in FP8 (benchmarks/results/2026-11-26-kernels-trial.md)."""
_BOTH_QUARTER, _BOTH_WARPS = 8, 4
"""The same where the gradients' rows are written, the columns beside them or not; timed with bf16 gate and up and with
columns alone (benchmarks/results/2026-11-23-kernels-tune-beside.json)."""


def _forward_options(mode: str, num_cols: int, with_hp: bool) -> dict[str, int]:
    """Choose how programs share the columns in forward: BLOCK columns each (FITS: no more are needed), and their warps.

    Rowwise, the limit of registers a thread gives a multiprocessor three programs of a row of 16384, of which one loads
    while another computes.
    """
    if mode != "rowwise":
        return {"FITS": True, "BLOCK": _BLOCK, "num_warps": _BLOCK // (32 * 16)}
    if num_cols > _MAX_ROW:
        return {"FITS": False, "BLOCK": _LONG_ROW_BLOCK, "num_warps": _LONG_ROW_BLOCK // (32 * 32)}
    block = max(triton.next_power_of_2(num_cols), 1024)
    return {"FITS": True, "BLOCK": block, "num_warps": block // (32 * 32), "maxnreg": 64 if with_hp else 40}


def _scales(mode: str, slot: SlotTensors, scale_inv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scale, scale_inv, amax) for a kernel: those of the slot, or empty ones that it fills."""
    if mode == "given":
        assert slot.scale is not None and slot.scale_inv is not None
        amax = slot.scale_inv if slot.amax_local is None else slot.amax_local  # None: nothing is recorded
        return slot.scale, slot.scale_inv.clone(), amax
    amax = torch.zeros_like(scale_inv) if mode == "tensorwise" else scale_inv
    return scale_inv, scale_inv, amax


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
    """Triton version of `reference.swiglu`, within the bounds that the package states."""
    x_fp8, found, hp = empty_output(gate, mode, dtype, with_hp)
    scales, record = _scales(mode, SlotTensors(scale, scale_inv, amax_local), found), amax_local is not None
    _product(mode, _MODES[mode], gate, up, x_fp8.view(torch.uint8), hp, scales, record, fp8_max, with_hp)
    return x_fp8, scales[1], hp, scales[2] if mode == "tensorwise" else empty_amax(mode, gate)


def _read_kept(
    gate: Tensor, up: Tensor, gate_kept: Tensor | None, up_kept: Tensor | None, unread: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return (tensors, strides) by which a kernel of tiles reads gate and up, in bf16 or as codes."""
    if gate_kept is None or up_kept is None:
        return (gate, up, unread, unread), (gate.stride(0), up.stride(0), 0, 0)
    tensors = gate.view(torch.uint8), up.view(torch.uint8), gate_kept, up_kept
    return tensors, (gate.stride(0), up.stride(0), *gate_kept.stride())


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
    """Triton version of `reference.swiglu_columns`; tensorwise, a pass finds the amax if it is not known."""
    num_rows, num_cols = gate.shape
    columns = torch.empty((num_cols, num_rows), dtype=dtype, device=gate.device)
    passes, is_kept = _MODES[mode], gate_kept is not None
    found = torch.empty((), dtype=torch.float32, device=gate.device)
    if mode == "tensorwise" and amax is not None:
        scales, passes = (found, found, amax), passes[1:]
    else:
        scales = _scales(mode, SlotTensors(scale, scale_inv, None), found)
        if not is_kept:  # a row at a time, which is faster, writes nothing
            none = gate.new_empty(0)
            _product(mode, passes[:-1], gate, up, columns.view(torch.uint8), none, scales, False, fp8_max, False)
            passes = passes[-1:]
    tensors, strides = _read_kept(gate, up, gate_kept, up_kept, found)
    words = as_words(columns)
    quarter, warps = (_KEPT_QUARTER, _KEPT_WARPS) if is_kept else (_COLUMNS_QUARTER, _COLUMNS_WARPS)
    for kernel_mode in passes:
        launch(
            swiglu_columns_kernel,
            num_tiles(num_rows, num_cols, quarter),
            *tensors,
            words,
            *scales,
            num_rows,
            num_cols,
            *strides,
            MODE=kernel_mode,
            KEPT=is_kept,
            FP8_MAX=fp8_max,
            PTX=runs_ptx(gate),
            num_warps=warps,
            enable_fp_fusion=False,
            **tile_options(quarter, num_rows, num_cols, words),
        )
    return columns, scales[1]


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
    """Triton version of `reference.swiglu_backward_and_columns`."""
    num_rows, num_cols = gate.shape
    is_kept = gate_kept is not None
    columns = torch.empty((0 if is_kept else num_cols, num_rows), dtype=dtype, device=gate.device)
    fp8s = [torch.empty((num_rows, num_cols), dtype=grad_dtype, device=gate.device) for _ in range(2)]
    founds = [torch.empty((), dtype=torch.float32, device=gate.device) for _ in range(3)]
    of_gate = _scales(mode, SlotTensors(gate_scale, gate_scale_inv, gate_amax), founds[1])
    of_up = _scales(mode, SlotTensors(up_scale, up_scale_inv, up_amax), founds[2])
    if is_kept and mode != "tensorwise":
        of_product = (founds[0],) * 3
    elif mode == "tensorwise" and amax is not None:
        of_product = founds[0], founds[0], amax
    else:
        of_product = _scales(mode, SlotTensors(scale, scale_inv, None), founds[0])
    tensors, strides = _read_kept(gate, up, gate_kept, up_kept, founds[0])
    words = as_words(columns)
    for kernel_mode in _MODES[mode]:
        launch(
            swiglu_backward_and_columns_kernel,
            num_tiles(num_rows, num_cols, _BOTH_QUARTER),
            grad_hidden,
            *tensors,
            words,
            *(fp8.view(torch.uint8) for fp8 in fp8s),
            *of_product,
            *of_gate,
            *of_up,
            num_rows,
            num_cols,
            grad_hidden.stride(0),
            *strides,
            MODE=kernel_mode,
            MEASURES=amax is None,
            KEPT=is_kept,
            FP8_MAX=fp8_max,
            GRAD_MAX=grad_max,
            PTX=runs_ptx(gate),
            num_warps=_BOTH_WARPS,
            enable_fp_fusion=False,
            **tile_options(_BOTH_QUARTER, num_rows, num_cols, words),
        )
    return columns, of_product[2 if is_kept else 1], fp8s[0], of_gate[1], fp8s[1], of_up[1]


def _product(
    mode: str,
    kernel_modes: list[int],
    gate: Tensor,
    up: Tensor,
    x_fp8: Tensor,
    hp: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    record: bool,
    fp8_max: float,
    with_hp: bool,
) -> None:
    """Fill `x_fp8`, `hp` and the tensors in `scales`."""
    num_rows, num_cols = gate.shape
    for kernel_mode in kernel_modes:
        launch(
            swiglu_kernel,
            num_rows if mode == "rowwise" else num_rows * ceil_div(num_cols, _BLOCK),
            gate,
            up,
            x_fp8,
            hp,
            *scales,
            num_cols,
            gate.stride(0),
            up.stride(0),
            MODE=kernel_mode,
            RECORD=record,
            HAS_HP=with_hp,
            FP8_MAX=fp8_max,
            PTX=runs_ptx(gate),
            enable_fp_fusion=False,
            **_forward_options(mode, num_cols, with_hp),
        )


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Triton version of `reference.swiglu_backward`, within the bounds that the package states."""
    grads = empty_gradients(gate, packed)
    hps = (grads[0], grads[0][:, gate.shape[1] :]) if packed else grads
    unused = (torch.empty(0, dtype=torch.float32, device=gate.device),) * 3
    _backward([BF16], grad_hidden, gate, up, hps, hps, unused, unused, 0.0, True)
    return grads


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
    """Triton version of `reference.swiglu_backward_to_fp8`."""
    gate_fp8, gate_found, gate_hp = empty_output(gate, mode, dtype, with_hp)
    up_fp8, up_found, up_hp = empty_output(gate, mode, dtype, with_hp)
    of_gate = _scales(mode, SlotTensors(gate_scale, gate_scale_inv, gate_amax), gate_found)
    of_up = _scales(mode, SlotTensors(up_scale, up_scale_inv, up_amax), up_found)
    fp8s = gate_fp8.view(torch.uint8), up_fp8.view(torch.uint8)
    _backward(_MODES[mode], grad_hidden, gate, up, fp8s, (gate_hp, up_hp), of_gate, of_up, fp8_max, with_hp)
    return gate_fp8, of_gate[1], gate_hp, up_fp8, of_up[1], up_hp


def _backward(
    kernel_modes: list[int],
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fp8s: tuple[Tensor, Tensor],
    hps: tuple[Tensor, Tensor],
    of_gate: tuple[Tensor, Tensor, Tensor],
    of_up: tuple[Tensor, Tensor, Tensor],
    fp8_max: float,
    with_hp: bool,
) -> None:
    """Fill `fp8s`, `hps` and the tensors of the scales."""
    num_rows, num_cols = gate.shape
    for kernel_mode in kernel_modes:
        launch(
            swiglu_backward_kernel,
            num_rows * ceil_div(num_cols, _BLOCK),
            grad_hidden,
            gate,
            up,
            *fp8s,
            *hps,
            *of_gate,
            *of_up,
            num_cols,
            grad_hidden.stride(0),
            gate.stride(0),
            up.stride(0),
            hps[0].stride(0) if kernel_mode == BF16 else num_cols,
            MODE=kernel_mode,
            HAS_HP=with_hp,
            FP8_MAX=fp8_max,
            BLOCK=_BLOCK,
            PTX=runs_ptx(gate),
            num_warps=_BLOCK // (32 * (8 if kernel_mode == BF16 else 16)),
            enable_fp_fusion=False,
        )
