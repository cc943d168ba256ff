"""SwiGLU and its gradients by the Triton kernels: inputs read once (tensorwise: twice), bf16 written if asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fp8_ds.ops import _producer_device as device
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops._producer import SlotTensors, empty_amax, empty_output
from fp8_ds.ops._tiles import as_words, num_tiles, tile_options
from fp8_ds.ops.swiglu.columns_kernel import swiglu_backward_and_columns_kernel, swiglu_columns_kernel
from fp8_ds.ops.swiglu.kernel import BF16, swiglu_backward_kernel, swiglu_kernel

_MODES = {"given": [device.GIVEN], "rowwise": [device.ROWWISE], "tensorwise": [device.AMAX, device.FROM_AMAX]}
_BLOCK = 2048
"""Columns of a program that needs no whole row."""

_MAX_ROW, _LONG_ROW_BLOCK = 16384, 8192
"""A row of up to so many columns stays in registers; a longer one is taken in blocks, twice (again from L2)."""

_COLUMNS_QUARTER, _COLUMNS_WARPS = 16, 8
"""Of a program that writes columns: a quarter of its rows (ops/_tiles.py), and its warps. Both planes of the gradients
from one read were no faster on an H200 than rows and a transpose (measured on 2026-11-23)."""
_KEPT_QUARTER, _KEPT_WARPS = 8, 4
"""The same where gate and up are kept in FP8 (benchmarks/results/2026-11-26-kernels-trial.md)."""
_BOTH_QUARTER, _BOTH_WARPS = 8, 4
"""The same where the gradients' rows are written, the columns beside them or not; timed with bf16 gate and up and with
columns alone (benchmarks/results/2026-11-23-kernels-tune-beside.json)."""


@dataclass(frozen=True)
class _Launch:
    """How the columns are cut: programs of `block` columns (`fits`: that is all they have to see), each by `num_warps`.

    Args:
        max_registers: per thread: so many that a multiprocessor has two programs of a row of 16384 in backward and
            three in forward, of which one loads while another computes.
    """

    fits: bool
    block: int
    num_warps: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps} | ({} if self.max_registers is None else {"maxnreg": self.max_registers})


def _launch(mode: str, num_cols: int, max_registers: int) -> _Launch:
    if mode == "bf16":
        return _Launch(True, _BLOCK, _BLOCK // (32 * 8))
    if mode != "rowwise":
        return _Launch(True, _BLOCK, _BLOCK // (32 * 16))
    if num_cols > _MAX_ROW:
        return _Launch(False, _LONG_ROW_BLOCK, _LONG_ROW_BLOCK // (32 * 32))
    block = max(triton.next_power_of_2(num_cols), 1024)
    return _Launch(True, block, block // (32 * 32), max_registers)


def _num_programs(mode: str, num_rows: int, num_cols: int) -> int:
    return num_rows if mode == "rowwise" else num_rows * ceil_div(num_cols, _BLOCK)


def _scales(mode: str, slot: SlotTensors, scale_inv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, scale_inv, amax) for a kernel: of the slot, or empty ones that it fills."""
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
    slot: SlotTensors,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
    with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_fp8, scale_inv, hp, amax); hp has no elements unless `with_hp`, amax none unless the mode is tensorwise."""
    num_rows, num_cols = gate.shape
    x_fp8, scale_inv, hp = empty_output(num_rows, num_cols, mode, dtype, with_hp, gate)
    scales = _scales(mode, slot, scale_inv)
    records = mode == "given" and record
    _product(mode, _MODES[mode], gate, up, x_fp8.view(torch.uint8), hp, scales, records, fp8_max, twice, with_hp)
    return x_fp8, scales[1], hp, scales[2] if mode == "tensorwise" else empty_amax(mode, gate)


def _read_kept(
    gate: Tensor, up: Tensor, scales: tuple[Tensor, Tensor] | None, unread: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    """How a kernel of tiles is given gate and up, in bf16 or as codes: (tensors, strides, whether they are codes)."""
    kept = (unread, unread) if scales is None else scales
    if scales is not None:
        gate, up = gate.view(torch.uint8), up.view(torch.uint8)
    of_scales = (0, 0) if scales is None else kept[0].stride()
    return (gate, up, *kept), (gate.stride(0), up.stride(0), *of_scales), scales is not None


def swiglu_columns(
    gate: Tensor,
    up: Tensor,
    kept_scales: tuple[Tensor, Tensor] | None,
    mode: str,
    slot: SlotTensors,
    amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
) -> tuple[Tensor, Tensor]:
    """(x_fp8 transposed, scale_inv); nothing is recorded. Tensorwise, a pass finds the amax if it is not known."""
    num_rows, num_cols = gate.shape
    columns = torch.empty((num_cols, num_rows), dtype=dtype, device=gate.device)
    passes = _MODES[mode]
    found = torch.empty((), dtype=torch.float32, device=gate.device)
    if mode == "tensorwise" and amax is not None:
        scales, passes = (found, found, amax), passes[1:]
    else:
        scales = _scales(mode, slot, found)
        if kept_scales is None:  # a row at a time, which is faster, writes nothing
            none = gate.new_empty(0)
            _product(mode, passes[:-1], gate, up, columns.view(torch.uint8), none, scales, False, fp8_max, twice, False)
            passes = passes[-1:]
    tensors, strides, is_kept = _read_kept(gate, up, kept_scales, found)
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
            TWICE=twice,
            FP8_MAX=fp8_max,
            PTX=gate.is_cuda and torch.version.hip is None,
            num_warps=warps,
            enable_fp_fusion=False,
            **tile_options(quarter, num_rows, num_cols, words),
        )
    return columns, scales[1]


def swiglu_backward_and_columns(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    kept_scales: tuple[Tensor, Tensor] | None,
    mode: str,
    slots: tuple[SlotTensors, SlotTensors, SlotTensors],
    amax: Tensor | None,
    record: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    fp8_maxes: tuple[float, float],
    twice: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the product (x_fp8 transposed, scale_inv), of grad_gate and of grad_up (x_fp8, scale_inv).

    With `kept_scales` no columns: `swiglu_columns` reads codes by itself. Tensorwise the amax of the product is in the
    place of their scale_inv.
    """
    num_rows, num_cols = gate.shape
    columns = torch.empty((0 if kept_scales else num_cols, num_rows), dtype=dtypes[0], device=gate.device)
    fp8s = [torch.empty((num_rows, num_cols), dtype=dtypes[1], device=gate.device) for _ in range(2)]
    founds = [torch.empty((), dtype=torch.float32, device=gate.device) for _ in range(3)]
    of_grads = [_scales(mode, slot, found) for slot, found in zip(slots[1:], founds[1:], strict=True)]
    if kept_scales is not None and mode != "tensorwise":
        of_product = (founds[0],) * 3
    elif mode == "tensorwise" and amax is not None:
        of_product = founds[0], founds[0], amax
    else:
        of_product = _scales(mode, slots[0], founds[0])
    tensors, strides, is_kept = _read_kept(gate, up, kept_scales, founds[0])
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
            *of_grads[0],
            *of_grads[1],
            num_rows,
            num_cols,
            grad_hidden.stride(0),
            *strides,
            MODE=kernel_mode,
            RECORD=mode == "given" and record,
            MEASURES=amax is None,
            KEPT=is_kept,
            TWICE=twice,
            FP8_MAX=fp8_maxes[0],
            GRAD_MAX=fp8_maxes[1],
            PTX=gate.is_cuda and torch.version.hip is None,
            num_warps=_BOTH_WARPS,
            enable_fp_fusion=False,
            **tile_options(_BOTH_QUARTER, num_rows, num_cols, words),
        )
    of_columns = of_product[1 if kept_scales is None else 2]
    return columns, of_columns, fp8s[0], of_grads[0][1], fp8s[1], of_grads[1][1]


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
    twice: bool,
    with_hp: bool,
) -> None:
    """Fills `x_fp8` and `hp`, and what is in `scales`."""
    num_rows, num_cols = gate.shape
    settings = _launch(mode, num_cols, 64 if with_hp else 40)
    for kernel_mode in kernel_modes:
        launch(
            swiglu_kernel,
            _num_programs(mode, num_rows, num_cols),
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
            TWICE=twice,
            HAS_HP=with_hp,
            FP8_MAX=fp8_max,
            FITS=settings.fits,
            BLOCK=settings.block,
            PTX=gate.is_cuda and torch.version.hip is None,
            enable_fp_fusion=False,
            **settings.options,
        )


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, twice: bool) -> tuple[Tensor, Tensor]:
    """(grad_gate, grad_up), or ([T, 2F], no elements) if `packed`."""
    num_rows, num_cols = gate.shape
    hps = [
        torch.empty(shape, dtype=gate.dtype, device=gate.device)
        for shape in ([(num_rows, 2 * num_cols), (0,)] if packed else [(num_rows, num_cols)] * 2)
    ]
    unused = (torch.empty(0, dtype=torch.float32, device=gate.device),) * 3
    _backward("bf16", [BF16], grad_hidden, gate, up, packed, hps, hps, [unused] * 2, False, 0.0, twice, True)
    return hps[0], hps[1]


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
    with_hp: bool,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x_fp8, scale_inv, hp) of grad_gate and of grad_up, or of both in one if `packed`."""
    num_rows, num_cols = gate.shape
    num_outputs, width = (1, 2 * num_cols) if packed else (2, num_cols)
    outputs = [empty_output(num_rows, width, mode, dtype, with_hp, gate) for _ in range(num_outputs)]
    scales = [_scales(mode, slot, output[1]) for slot, output in zip(slots, outputs, strict=False)]
    fp8s = [output[0].view(torch.uint8) for output in outputs]
    hps = [output[2] for output in outputs]
    _backward(
        mode, _MODES[mode], grad_hidden, gate, up, packed, fp8s, hps, scales, mode == "given" and record, fp8_max,
        twice, with_hp,
    )  # fmt: skip
    return [(output[0], scale[1], output[2]) for output, scale in zip(outputs, scales, strict=True)]


def _backward(
    mode: str,
    kernel_modes: list[int],
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    packed: bool,
    fp8s: list[Tensor],
    hps: list[Tensor],
    scales: list[tuple[Tensor, Tensor, Tensor]],
    record: bool,
    fp8_max: float,
    twice: bool,
    with_hp: bool,
) -> None:
    """Fills `fp8s` and `hps` (one each if `packed`, else two), and what is in `scales`."""
    num_rows, num_cols = gate.shape
    settings = _launch(mode, num_cols, 64)
    if packed:
        fp8s, hps = ([one[0], one[0][:, num_cols:] if one[0].dim() == 2 else one[0]] for one in (fp8s, hps))
    for kernel_mode in kernel_modes:
        launch(
            swiglu_backward_kernel,
            _num_programs(mode, num_rows, num_cols),
            grad_hidden,
            gate,
            up,
            *fp8s,
            *hps,
            *scales[0],
            *scales[-1],
            num_cols,
            grad_hidden.stride(0),
            gate.stride(0),
            up.stride(0),
            2 * num_cols if packed else num_cols,
            MODE=kernel_mode,
            RECORD=record,
            TWICE=twice,
            HAS_HP=with_hp,
            PACKED=packed,
            FP8_MAX=fp8_max,
            FITS=settings.fits,
            BLOCK=settings.block,
            PTX=gate.is_cuda and torch.version.hip is None,
            enable_fp_fusion=False,
            **settings.options,
        )
