"""The operators that torch knows: by a Triton kernel on CUDA, by the reference elsewhere. What a caller gets is made
of them in the package's own file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.ops._producer import SlotTensors, empty_amax, empty_output, takes_kernel
from fp8_ds.ops._register import register
from fp8_ds.ops.swiglu import reference

_KEEP: list[torch.library.Library] = []
"""Library handles; the ops live as long as these."""


def _kernel(
    gate: Tensor,
    up: Tensor,
    scaling: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax_local: Tensor | None,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
    with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slot = SlotTensors(scale, scale_inv, amax_local)
    if takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton  # the package is missing where there is no GPU

        return triton.swiglu(gate, up, scaling, slot, record, dtype, fp8_max, twice, with_hp)
    x_fp8, out_scale_inv, hp, amax = reference.swiglu(gate, up, scaling, slot, record, dtype, fp8_max, twice)
    return x_fp8, out_scale_inv, hp if with_hp else hp.new_empty(0), amax


def _fake(
    gate: Tensor, up: Tensor, scaling: str, scale: Any, scale_inv: Any, amax_local: Any, record: bool,
    dtype: torch.dtype, fp8_max: float, twice: bool, with_hp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_fp8, out_scale_inv, hp = empty_output(gate.shape[0], gate.shape[1], scaling, dtype, with_hp, gate)
    return x_fp8, out_scale_inv, hp, empty_amax(scaling, gate)


def _backward_kernel(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, twice: bool) -> tuple[Tensor, Tensor]:
    if takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_backward(grad_hidden, gate, up, packed, twice)
    return reference.swiglu_backward(grad_hidden, gate, up, packed, twice)


def _backward_fake(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, twice: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = gate.shape
    if packed:
        return gate.new_empty(num_rows, 2 * num_cols), gate.new_empty(0)
    return gate.new_empty(num_rows, num_cols), gate.new_empty(num_rows, num_cols)


SixTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x_fp8, scale_inv and hp of grad_gate, or of both if packed, and of grad_up, or three of no elements."""


def _six(outputs: list[list[Tensor]]) -> SixTensors:
    first = outputs[0]
    second = outputs[1] if len(outputs) == 2 else [one.new_empty(0) for one in first]
    return first[0], first[1], first[2], second[0], second[1], second[2]


def _backward_fp8_kernel(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    packed: bool,
    scaling: str,
    gate_scale: Tensor | None,
    gate_scale_inv: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_scale_inv: Tensor | None,
    up_amax: Tensor | None,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
    with_hp: bool,
) -> SixTensors:
    slots = SlotTensors(gate_scale, gate_scale_inv, gate_amax), SlotTensors(up_scale, up_scale_inv, up_amax)
    if takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        outputs = triton.swiglu_backward_to_fp8(
            grad_hidden, gate, up, packed, scaling, slots, record, dtype, fp8_max, twice, with_hp
        )
    else:
        outputs = reference.swiglu_backward_to_fp8(
            grad_hidden, gate, up, packed, scaling, slots, record, dtype, fp8_max, twice
        )
    return _six([[x_fp8, scale_inv, hp if with_hp else hp.new_empty(0)] for x_fp8, scale_inv, hp in outputs])


def _backward_fp8_fake(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, scaling: str, gate_scale: Any, gate_scale_inv: Any,
    gate_amax: Any, up_scale: Any, up_scale_inv: Any, up_amax: Any, record: bool, dtype: torch.dtype, fp8_max: float,
    twice: bool, with_hp: bool,
) -> SixTensors:  # fmt: skip
    num_rows, num_cols = gate.shape
    num_outputs, width = (1, 2 * num_cols) if packed else (2, num_cols)
    return _six([empty_output(num_rows, width, scaling, dtype, with_hp, gate) for _ in range(num_outputs)])


swiglu, _handle = register(
    "swiglu(Tensor gate, Tensor up, str scaling, Tensor? scale, Tensor? scale_inv, Tensor(a!)? amax_local, "
    "bool record, ScalarType dtype, float fp8_max, bool twice, bool with_hp) -> (Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
)
_KEEP.append(_handle)
swiglu_backward, _handle = register(
    "swiglu_backward(Tensor grad_hidden, Tensor gate, Tensor up, bool packed, bool twice) -> (Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_KEEP.append(_handle)
swiglu_backward_to_fp8, _handle = register(
    "swiglu_backward_to_fp8(Tensor grad_hidden, Tensor gate, Tensor up, bool packed, str scaling, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "bool record, ScalarType dtype, float fp8_max, bool twice, bool with_hp) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fp8_kernel,
    _backward_fp8_fake,
)
_KEEP.append(_handle)


def _scales_of(gate_kept: Tensor | None, up_kept: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if gate_kept is None or up_kept is None else (gate_kept, up_kept)


def _columns_kernel(
    gate: Tensor,
    up: Tensor,
    gate_kept: Tensor | None,
    up_kept: Tensor | None,
    scaling: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    fp8_max: float,
    twice: bool,
) -> tuple[Tensor, Tensor]:
    slot, kept_scales = SlotTensors(scale, scale_inv, None), _scales_of(gate_kept, up_kept)
    if takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_columns(gate, up, kept_scales, scaling, slot, amax, dtype, fp8_max, twice)
    factors = reference.factors(gate, up, kept_scales)
    return reference.swiglu_columns(*factors, scaling, slot, dtype, fp8_max, twice)


def _columns_fake(
    gate: Tensor, up: Tensor, gate_kept: Any, up_kept: Any, scaling: str, scale: Any, scale_inv: Any, amax: Any,
    dtype: torch.dtype, fp8_max: float, twice: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gate.new_empty((gate.shape[1], gate.shape[0]), dtype=dtype), gate.new_empty((), dtype=torch.float32)


swiglu_columns, _handle = register(
    "swiglu_columns(Tensor gate, Tensor up, Tensor? gate_kept, Tensor? up_kept, str scaling, Tensor? scale, "
    "Tensor? scale_inv, Tensor? amax, ScalarType dtype, float fp8_max, bool twice) -> (Tensor, Tensor)",
    _columns_kernel,
    _columns_fake,
)
_KEEP.append(_handle)


def _backward_columns_kernel(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_kept: Tensor | None,
    up_kept: Tensor | None,
    scaling: str,
    scale: Tensor | None,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    gate_scale: Tensor | None,
    gate_scale_inv: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_scale_inv: Tensor | None,
    up_amax: Tensor | None,
    record: bool,
    dtype: torch.dtype,
    fp8_max: float,
    grad_dtype: torch.dtype,
    grad_max: float,
    twice: bool,
) -> SixTensors:
    product = SlotTensors(scale, scale_inv, None)
    grads = SlotTensors(gate_scale, gate_scale_inv, gate_amax), SlotTensors(up_scale, up_scale_inv, up_amax)
    kept_scales = _scales_of(gate_kept, up_kept)
    if takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_backward_and_columns(
            grad_hidden, gate, up, kept_scales, scaling, (product, *grads), amax, record,
            (dtype, grad_dtype), (fp8_max, grad_max), twice,
        )  # fmt: skip
    factors = reference.factors(gate, up, kept_scales)
    if kept_scales is None:
        columns = reference.swiglu_columns(*factors, scaling, product, dtype, fp8_max, twice)
    else:
        if scaling == "tensorwise":
            *_, measured = reference.swiglu(*factors, scaling, product, False, dtype, fp8_max, twice)
        else:
            measured = gate.new_empty((), dtype=torch.float32)
        columns = gate.new_empty((0, gate.shape[0]), dtype=dtype), measured
    first, second = reference.swiglu_backward_to_fp8(
        grad_hidden, *factors, False, scaling, grads, record, grad_dtype, grad_max, twice
    )
    return *columns, *first[:2], *second[:2]


def _backward_columns_fake(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, gate_kept: Any, up_kept: Any, scaling: str,
    scale: Any, scale_inv: Any, amax: Any, gate_scale: Any, gate_scale_inv: Any, gate_amax: Any, up_scale: Any,
    up_scale_inv: Any, up_amax: Any, record: bool, dtype: torch.dtype, fp8_max: float, grad_dtype: torch.dtype,
    grad_max: float, twice: bool,
) -> SixTensors:  # fmt: skip
    num_rows, num_cols = gate.shape
    columns, grads = (num_cols if gate_kept is None else 0, num_rows), (num_rows, num_cols)
    planes = [gate.new_empty(columns, dtype=dtype), *(gate.new_empty(grads, dtype=grad_dtype) for _ in range(2))]
    scales = [gate.new_empty((), dtype=torch.float32) for _ in range(3)]
    return planes[0], scales[0], planes[1], scales[1], planes[2], scales[2]


swiglu_backward_and_columns, _handle = register(
    "swiglu_backward_and_columns(Tensor grad_hidden, Tensor gate, Tensor up, Tensor? gate_kept, Tensor? up_kept, "
    "str scaling, Tensor? scale, Tensor? scale_inv, Tensor? amax, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "bool record, ScalarType dtype, float fp8_max, ScalarType grad_dtype, float grad_max, bool twice) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_columns_kernel,
    _backward_columns_fake,
)
_KEEP.append(_handle)
