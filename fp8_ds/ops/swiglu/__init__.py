"""SwiGLU straight into FP8, `silu(gate) * up`, and its gradients in bf16 or straight into FP8.

bf16 results are those of the module that is replaced, and FP8 results are those bf16 values quantised as in
ops/quantize, so fusing changes no number but where exp does: the kernel's sigmoid is within 2**-17 of the reference's
for |gate| < 87. bf16 results then differ from the reference's by at most one ulp (two where they are rounded twice), in
fewer than 1 % of the elements, and FP8 codes by one step, where such an ulp crosses a boundary, in fewer than 0.1 %
(with errors of that size put into the reference: 0.07 % and 0.002 %). Where silu is below 2**-118 it may be zero.

`rounding="once"`: float32 throughout (inductor's fusion). `rounding="twice"`: silu, and grad * up in backward, are
rounded to bf16 on the way, as in eager `act_fn(gate) * up` of transformers' LlamaMLP and as Liger-Kernel does.

gate and up may be halves of one [T, 2F] tensor; of rows only the columns must be contiguous.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops._producer import (
    Fp8Output,
    Rounding,
    Scaling,
    SlotTensors,
    check_rows,
    empty_amax,
    empty_output,
    is_twice,
    mode_of,
)
from fp8_ds.ops._register import register
from fp8_ds.ops.groupwise import check_groups
from fp8_ds.ops.swiglu import reference
from fp8_ds.scaling.delayed import AmaxSlot

__all__ = [
    "Fp8Output",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_columns",
    "swiglu_backward_fp8",
    "swiglu_backward_kept",
    "swiglu_backward_packed",
    "swiglu_backward_packed_fp8",
    "swiglu_columns",
    "swiglu_with_amax",
]


_KEEP: list[torch.library.Library] = []
"""Library handles; the ops live as long as these."""


def _takes_kernel(x: Tensor) -> bool:
    """No elements, no launch: the reference has nothing to compute then."""
    return x.is_cuda and x.numel() > 0


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
    if _takes_kernel(gate):
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
    if _takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_backward(grad_hidden, gate, up, packed, twice)
    return reference.swiglu_backward(grad_hidden, gate, up, packed, twice)


def _backward_fake(grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, twice: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = gate.shape
    if packed:
        return gate.new_empty(num_rows, 2 * num_cols), gate.new_empty(0)
    return gate.new_empty(num_rows, num_cols), gate.new_empty(num_rows, num_cols)


_SixTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x_fp8, scale_inv and hp of grad_gate, or of both if packed, and of grad_up, or three of no elements."""


def _six(outputs: list[list[Tensor]]) -> _SixTensors:
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
) -> _SixTensors:
    slots = SlotTensors(gate_scale, gate_scale_inv, gate_amax), SlotTensors(up_scale, up_scale_inv, up_amax)
    if _takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        outputs = triton.swiglu_backward_fp8(
            grad_hidden, gate, up, packed, scaling, slots, record, dtype, fp8_max, twice, with_hp
        )
    else:
        outputs = reference.swiglu_backward_fp8(
            grad_hidden, gate, up, packed, scaling, slots, record, dtype, fp8_max, twice
        )
    return _six([[x_fp8, scale_inv, hp if with_hp else hp.new_empty(0)] for x_fp8, scale_inv, hp in outputs])


def _backward_fp8_fake(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, packed: bool, scaling: str, gate_scale: Any, gate_scale_inv: Any,
    gate_amax: Any, up_scale: Any, up_scale_inv: Any, up_amax: Any, record: bool, dtype: torch.dtype, fp8_max: float,
    twice: bool, with_hp: bool,
) -> _SixTensors:  # fmt: skip
    num_rows, num_cols = gate.shape
    num_outputs, width = (1, 2 * num_cols) if packed else (2, num_cols)
    return _six([empty_output(num_rows, width, scaling, dtype, with_hp, gate) for _ in range(num_outputs)])


_swiglu, _handle = register(
    "swiglu(Tensor gate, Tensor up, str scaling, Tensor? scale, Tensor? scale_inv, Tensor(a!)? amax_local, "
    "bool record, ScalarType dtype, float fp8_max, bool twice, bool with_hp) -> (Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
)
_KEEP.append(_handle)
_swiglu_backward, _handle = register(
    "swiglu_backward(Tensor grad_hidden, Tensor gate, Tensor up, bool packed, bool twice) -> (Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_KEEP.append(_handle)
_swiglu_backward_fp8, _handle = register(
    "swiglu_backward_fp8(Tensor grad_hidden, Tensor gate, Tensor up, bool packed, str scaling, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "bool record, ScalarType dtype, float fp8_max, bool twice, bool with_hp) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fp8_kernel,
    _backward_fp8_fake,
)
_KEEP.append(_handle)


_Factor = Tensor | tuple[Tensor, Tensor]
"""bf16 [T, F], rows without gaps, any stride between them; or what `ops.groupwise.quantize_groupwise` made of it: it is
read as what would come back."""


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
    if _takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_columns(gate, up, kept_scales, scaling, slot, amax, dtype, fp8_max, twice)
    factors = reference.factors(gate, up, kept_scales)
    return reference.swiglu_columns(*factors, scaling, slot, dtype, fp8_max, twice)


def _columns_fake(
    gate: Tensor, up: Tensor, gate_kept: Any, up_kept: Any, scaling: str, scale: Any, scale_inv: Any, amax: Any,
    dtype: torch.dtype, fp8_max: float, twice: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gate.new_empty((gate.shape[1], gate.shape[0]), dtype=dtype), gate.new_empty((), dtype=torch.float32)


_swiglu_columns, _handle = register(
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
) -> _SixTensors:
    product = SlotTensors(scale, scale_inv, None)
    grads = SlotTensors(gate_scale, gate_scale_inv, gate_amax), SlotTensors(up_scale, up_scale_inv, up_amax)
    kept_scales = _scales_of(gate_kept, up_kept)
    if _takes_kernel(gate):
        from fp8_ds.ops.swiglu import triton

        return triton.swiglu_backward_columns(
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
    first, second = reference.swiglu_backward_fp8(
        grad_hidden, *factors, False, scaling, grads, record, grad_dtype, grad_max, twice
    )
    return *columns, *first[:2], *second[:2]


def _backward_columns_fake(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, gate_kept: Any, up_kept: Any, scaling: str,
    scale: Any, scale_inv: Any, amax: Any, gate_scale: Any, gate_scale_inv: Any, gate_amax: Any, up_scale: Any,
    up_scale_inv: Any, up_amax: Any, record: bool, dtype: torch.dtype, fp8_max: float, grad_dtype: torch.dtype,
    grad_max: float, twice: bool,
) -> _SixTensors:  # fmt: skip
    num_rows, num_cols = gate.shape
    columns, grads = (num_cols if gate_kept is None else 0, num_rows), (num_rows, num_cols)
    planes = [gate.new_empty(columns, dtype=dtype), *(gate.new_empty(grads, dtype=grad_dtype) for _ in range(2))]
    scales = [gate.new_empty((), dtype=torch.float32) for _ in range(3)]
    return planes[0], scales[0], planes[1], scales[1], planes[2], scales[2]


_swiglu_backward_columns, _handle = register(
    "swiglu_backward_columns(Tensor grad_hidden, Tensor gate, Tensor up, Tensor? gate_kept, Tensor? up_kept, "
    "str scaling, Tensor? scale, Tensor? scale_inv, Tensor? amax, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "bool record, ScalarType dtype, float fp8_max, ScalarType grad_dtype, float grad_max, bool twice) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_columns_kernel,
    _backward_columns_fake,
)
_KEEP.append(_handle)


def _parts(gate: _Factor, up: _Factor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Values of both and scales of both, looked at."""
    if isinstance(gate, tuple) and isinstance(up, tuple):
        check_groups("gate", *gate)
        check_groups("up", *up)
        if gate[1].stride() != up[1].stride():
            raise ValueError(
                f"up: expected scales with the strides of gate's, {gate[1].stride()}, got {up[1].stride()}. Pass what "
                "quantize_groupwise gave."
            )
        return gate[0], up[0], gate[1], up[1]
    if isinstance(gate, tuple) or isinstance(up, tuple):
        raise ValueError("up: expected to be kept as gate is, got one in bf16 and one in codes. Keep both alike.")
    check_rows("gate", gate)
    check_rows("up", up, gate)
    return gate, up, None, None


def _output(x_fp8: Tensor, scale_inv: Tensor, hp: Tensor, with_hp: bool) -> Fp8Output:
    return Fp8Output(x_fp8, scale_inv, hp if with_hp else None)


def _check(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> None:
    check_rows("gate", gate)
    check_rows("up", up, gate)
    check_rows("grad_hidden", grad_hidden, gate)


def swiglu(
    gate: Tensor,
    up: Tensor,
    fmt: Float8Format,
    scaling: Scaling,
    *,
    record: bool = True,
    rounding: Rounding = "once",
    with_hp: bool = False,
) -> Fp8Output:
    """`silu(gate) * up` in FP8, and in bf16 too if `with_hp`.

    Args:
        gate: bf16 [T, F], rows without gaps, any stride between them.
        up: the same.
        fmt: E4M3 or E5M2.
        scaling: see `Scaling`.
        record: with a slot: whether its amax_local takes the maximum (training), or is left (evaluation).
        rounding: see the module's text.
        with_hp: whether the bf16 values are written too.

    Raises:
        ValueError: another dtype, shape, layout, format, scaling or rounding.
    """
    return swiglu_with_amax(gate, up, fmt, scaling, record=record, rounding=rounding, with_hp=with_hp)[0]


def swiglu_with_amax(
    gate: Tensor,
    up: Tensor,
    fmt: Float8Format,
    scaling: Scaling,
    *,
    record: bool = True,
    rounding: Rounding = "once",
    with_hp: bool = False,
) -> tuple[Fp8Output, Tensor | None]:
    """`swiglu`, and float32, 0-dim, its amax where that was measured: "tensorwise" (else None).

    Args: as there.
    """
    check_rows("gate", gate)
    check_rows("up", up, gate)
    mode, slot = mode_of(scaling)
    if not record:  # what is not written must not be an argument that a graph takes for written
        slot = slot._replace(amax_local=None)
    dtype, twice = fmt.torch_dtype, is_twice(rounding)
    x_fp8, scale_inv, hp, amax = _swiglu(gate, up, mode, *slot, record, dtype, fmt.max, twice, with_hp)
    return _output(x_fp8, scale_inv, hp, with_hp), amax if mode == "tensorwise" else None


def swiglu_backward(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, *, rounding: Rounding = "once"
) -> tuple[Tensor, Tensor]:
    """Gradients of `silu(gate) * up`.

    Args:
        grad_hidden: bf16 [T, F]: gradient of the output; layout as for gate.
        gate: bf16 [T, F], rows without gaps, any stride between them.
        up: the same.
        rounding: see the module's text.

    Returns:
        (grad_gate, grad_up): bf16 [T, F], contiguous.
    """
    _check(grad_hidden, gate, up)
    grads: tuple[Tensor, Tensor] = _swiglu_backward(grad_hidden, gate, up, False, is_twice(rounding))
    return grads


def swiglu_backward_packed(grad_hidden: Tensor, gate_up: Tensor, *, rounding: Rounding = "once") -> Tensor:
    """Gradient of gate_up [T, 2F] (gate first), bf16 [T, 2F], contiguous; the rest as in `swiglu_backward`."""
    gate, up = _halves(gate_up)
    _check(grad_hidden, gate, up)
    grad: Tensor = _swiglu_backward(grad_hidden, gate, up, True, is_twice(rounding))[0]
    return grad


def swiglu_backward_fp8(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: Float8Format,
    scaling: tuple[AmaxSlot, AmaxSlot] | Literal["rowwise", "tensorwise"],
    *,
    record: bool = True,
    rounding: Rounding = "once",
    with_hp: bool = False,
) -> tuple[Fp8Output, Fp8Output]:
    """(grad_gate, grad_up) in FP8, each by scales of its own; the rest as in `swiglu` and `swiglu_backward`.

    Args:
        scaling: as for `swiglu`; with delayed scaling one slot for grad_gate and one for grad_up.
    """
    _check(grad_hidden, gate, up)
    (mode, gate_slot), (_, up_slot) = [
        mode_of(one) for one in (scaling if isinstance(scaling, tuple) else [scaling] * 2)
    ]
    g_fp8, g_scale_inv, g_hp, u_fp8, u_scale_inv, u_hp = _swiglu_backward_fp8(
        grad_hidden, gate, up, False, mode, *gate_slot, *up_slot, record, fmt.torch_dtype, fmt.max, is_twice(rounding),
        with_hp,
    )  # fmt: skip
    return _output(g_fp8, g_scale_inv, g_hp, with_hp), _output(u_fp8, u_scale_inv, u_hp, with_hp)


def swiglu_columns(
    gate: _Factor,
    up: _Factor,
    fmt: Float8Format,
    scaling: AmaxSlot | Literal["tensorwise"],
    *,
    rounding: Rounding = "once",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The transpose of what `swiglu` makes, and not that: (`fmt.dtype` [F, T], scale_inv); nothing is recorded.

    Args: as in `swiglu`; one scale for all, and
        gate: bf16, or codes and scales of `ops.groupwise.quantize_groupwise`, read as what would come back.
        up: the same.
        amax: float32, 0-dim, what `swiglu` measured of the same tensors: "tensorwise" reads them once then, not twice.
    """
    values = _parts(gate, up)
    mode, slot = mode_of(scaling)
    if mode == "rowwise":
        raise ValueError(
            "scaling: expected an AmaxSlot or 'tensorwise', got 'rowwise'. Columns have scales of their own there: "
            "quantise the bf16 values by them."
        )
    found: tuple[Tensor, Tensor] = _swiglu_columns(
        *values, mode, slot.scale, slot.scale_inv, amax, fmt.torch_dtype, fmt.max, is_twice(rounding)
    )
    return found


def swiglu_backward_kept(
    grad_hidden: Tensor,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    fmt: Float8Format,
    scalings: tuple[Scaling, Scaling],
    *,
    record: bool = True,
    rounding: Rounding = "once",
) -> tuple[Fp8Output, Fp8Output, Tensor | None]:
    """`swiglu_backward_fp8` of gate and up that `ops.groupwise.quantize_groupwise` keeps, read as they are.

    Args: as there, and
        scalings: of grad_gate and of grad_up: slots, or "tensorwise" for both.

    Returns:
        (grad_gate, grad_up, amax of the product for `swiglu_columns`, float32, 0-dim; None: not tensorwise).
    """
    found = _backward_columns(grad_hidden, gate, up, (fmt, fmt), (None, *scalings), record, rounding, None)
    amax = found[1] if mode_of(scalings[0])[0] == "tensorwise" else None
    return Fp8Output(found[2], found[3], None), Fp8Output(found[4], found[5], None), amax


def swiglu_backward_columns(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    formats: tuple[Float8Format, Float8Format],
    scalings: tuple[Scaling, Scaling, Scaling],
    *,
    record: bool = True,
    rounding: Rounding = "once",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Fp8Output, Fp8Output]:
    """`swiglu_columns` and `swiglu_backward_fp8` in one read of gate, up and grad_hidden; the same bits.

    Args: as there, and
        formats: of the product; of the gradients.
        scalings: of the product, of grad_gate and of grad_up: slots, of which the last two record, or "tensorwise" for
            all.

    Returns:
        (product transposed, `formats[0].dtype` [F, T]; its scale_inv; grad_gate; grad_up), the gradients without `hp`.
    """
    found = _backward_columns(grad_hidden, gate, up, formats, scalings, record, rounding, amax)
    return found[0], found[1], Fp8Output(found[2], found[3], None), Fp8Output(found[4], found[5], None)


def _backward_columns(
    grad_hidden: Tensor,
    gate: _Factor,
    up: _Factor,
    formats: tuple[Float8Format, Float8Format],
    scalings: tuple[Scaling | None, Scaling, Scaling],
    record: bool,
    rounding: Rounding,
    amax: Tensor | None,
) -> _SixTensors:
    """What the op gives; of gate and up that are kept, no columns, and without a scaling of the product."""
    values = _parts(gate, up)
    check_rows("grad_hidden", grad_hidden, values[0])
    modes, slots = zip(*(mode_of(one) for one in scalings if one is not None), strict=True)
    mode, (gate_slot, up_slot) = modes[0], slots[-2:]
    if len(set(modes)) > 1 or mode == "rowwise":
        raise ValueError(
            f"scalings: expected AmaxSlots or 'tensorwise' for all, got {modes} ('given': a slot). See swiglu_columns "
            "and swiglu_backward_fp8."
        )
    of_product = slots[0] if len(slots) == 3 else SlotTensors(None, None, None)
    found: _SixTensors = _swiglu_backward_columns(
        grad_hidden, *values, mode, *of_product[:2], amax, *gate_slot,
        *up_slot, record, formats[0].torch_dtype, formats[0].max, formats[1].torch_dtype, formats[1].max,
        is_twice(rounding),
    )  # fmt: skip
    return found


def swiglu_backward_packed_fp8(
    grad_hidden: Tensor,
    gate_up: Tensor,
    fmt: Float8Format,
    scaling: Scaling,
    *,
    record: bool = True,
    rounding: Rounding = "once",
    with_hp: bool = False,
) -> Fp8Output:
    """Gradient of gate_up [T, 2F] (gate first) in FP8; rowwise, a row of 2F has one scale."""
    gate, up = _halves(gate_up)
    _check(grad_hidden, gate, up)
    mode, slot = mode_of(scaling)
    none = SlotTensors(None, None, None)
    x_fp8, scale_inv, hp, *_ = _swiglu_backward_fp8(
        grad_hidden, gate, up, True, mode, *slot, *none, record, fmt.torch_dtype, fmt.max, is_twice(rounding), with_hp
    )
    return _output(x_fp8, scale_inv, hp, with_hp)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [T, 2F], got {tuple(gate_up.shape)}. Pass gate and up side by side.")
    half = gate_up.shape[1] // 2
    return gate_up[:, :half], gate_up[:, half:]
