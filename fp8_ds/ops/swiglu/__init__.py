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

from typing import Literal

from torch import Tensor

from fp8_ds.formats import Float8Format
from fp8_ds.ops._producer import (
    Fp8Output,
    Rounding,
    Scaling,
    SlotTensors,
    check_rows,
    is_twice,
    mode_of,
)
from fp8_ds.ops.groupwise import check_groups
from fp8_ds.ops.swiglu import operators
from fp8_ds.ops.swiglu.operators import SixTensors
from fp8_ds.scaling.delayed import AmaxSlot

__all__ = [
    "Fp8Output",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_and_columns",
    "swiglu_backward_kept",
    "swiglu_backward_packed",
    "swiglu_backward_packed_to_fp8",
    "swiglu_backward_to_fp8",
    "swiglu_columns",
    "swiglu_with_amax",
]

_Factor = Tensor | tuple[Tensor, Tensor]
"""bf16 [T, F], rows without gaps, any stride between them; or what `ops.groupwise.quantize_groupwise` made of it: it is
read as what would come back."""


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
    x_fp8, scale_inv, hp, amax = operators.swiglu(gate, up, mode, *slot, record, dtype, fmt.max, twice, with_hp)
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
    grads: tuple[Tensor, Tensor] = operators.swiglu_backward(grad_hidden, gate, up, False, is_twice(rounding))
    return grads


def swiglu_backward_packed(grad_hidden: Tensor, gate_up: Tensor, *, rounding: Rounding = "once") -> Tensor:
    """Gradient of gate_up [T, 2F] (gate first), bf16 [T, 2F], contiguous; the rest as in `swiglu_backward`."""
    gate, up = _halves(gate_up)
    _check(grad_hidden, gate, up)
    grad: Tensor = operators.swiglu_backward(grad_hidden, gate, up, True, is_twice(rounding))[0]
    return grad


def swiglu_backward_to_fp8(
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
    g_fp8, g_scale_inv, g_hp, u_fp8, u_scale_inv, u_hp = operators.swiglu_backward_to_fp8(
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
    found: tuple[Tensor, Tensor] = operators.swiglu_columns(
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
    """`swiglu_backward_to_fp8` of gate and up that `ops.groupwise.quantize_groupwise` keeps, read as they are.

    Args: as there, and
        scalings: of grad_gate and of grad_up: slots, or "tensorwise" for both.

    Returns:
        (grad_gate, grad_up, amax of the product for `swiglu_columns`, float32, 0-dim; None: not tensorwise).
    """
    found = _backward_columns(grad_hidden, gate, up, (fmt, fmt), (None, *scalings), record, rounding, None)
    amax = found[1] if mode_of(scalings[0])[0] == "tensorwise" else None
    return Fp8Output(found[2], found[3], None), Fp8Output(found[4], found[5], None), amax


def swiglu_backward_and_columns(
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
    """`swiglu_columns` and `swiglu_backward_to_fp8` in one read of gate, up and grad_hidden; the same bits.

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
) -> SixTensors:
    """What the op gives; of gate and up that are kept, no columns, and without a scaling of the product."""
    values = _parts(gate, up)
    check_rows("grad_hidden", grad_hidden, values[0])
    modes, slots = zip(*(mode_of(one) for one in scalings if one is not None), strict=True)
    mode, (gate_slot, up_slot) = modes[0], slots[-2:]
    if len(set(modes)) > 1 or mode == "rowwise":
        raise ValueError(
            f"scalings: expected AmaxSlots or 'tensorwise' for all, got {modes} ('given': a slot). See swiglu_columns "
            "and swiglu_backward_to_fp8."
        )
    of_product = slots[0] if len(slots) == 3 else SlotTensors(None, None, None)
    found: SixTensors = operators.swiglu_backward_and_columns(
        grad_hidden, *values, mode, *of_product[:2], amax, *gate_slot,
        *up_slot, record, formats[0].torch_dtype, formats[0].max, formats[1].torch_dtype, formats[1].max,
        is_twice(rounding),
    )  # fmt: skip
    return found


def swiglu_backward_packed_to_fp8(
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
    x_fp8, scale_inv, hp, *_ = operators.swiglu_backward_to_fp8(
        grad_hidden, gate, up, True, mode, *slot, *none, record, fmt.torch_dtype, fmt.max, is_twice(rounding), with_hp
    )
    return _output(x_fp8, scale_inv, hp, with_hp)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [T, 2F], got {tuple(gate_up.shape)}. Pass gate and up side by side.")
    half = gate_up.shape[1] // 2
    return gate_up[:, :half], gate_up[:, half:]
