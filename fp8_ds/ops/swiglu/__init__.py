"""SwiGLU straight into FP8, `silu(gate) * up`, and its gradients in bf16 or straight into FP8.

bf16 results are those of eager `act_fn(gate) * up` in transformers' LlamaMLP and of Liger-Kernel, which round silu, and
grad * up in backward, to bf16 on the way. FP8 results are those bf16 values quantised as in ops/quantize, so fusing
changes no number but where exp does: the kernel's sigmoid is within 2**-17 of the reference's for |gate| < 87. bf16
results then differ from the reference's by at most two ulps, in fewer than 1 % of the elements, and FP8 codes by one
step, where such an ulp crosses a boundary, in fewer than 0.1 % (with errors of that size put into the reference:
0.07 % and 0.002 %). Where silu is below 2**-118 it may be zero.

gate and up may be halves of one [T, 2F] tensor; of rows only the columns must be contiguous.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.numerics.formats import Float8Format
from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops._producer import Fp8Output, Scaling, SlotTensors, check_rows, empty_amax, empty_output, mode_of
from fp8_ds.ops._register import register_pair
from fp8_ds.ops.blockwise import check_groups
from fp8_ds.ops.swiglu import reference

_Factor = Tensor | tuple[Tensor, Tensor]
"""Input bf16 [T, F], rows without gaps, any stride between them; or the result of `ops.blockwise.quantize_groupwise`
for it, which is read as its dequantised values."""

_swiglu = register_pair(
    "swiglu(Tensor gate, Tensor up, str scaling, Tensor? scale, Tensor? scale_inv, Tensor(a!)? amax_local, "
    "ScalarType dtype, float fp8_max, bool with_hp) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.swiglu,
    lambda gate, up, scaling, scale, scale_inv, amax_local, dtype, fp8_max, with_hp: (
        *empty_output(gate, scaling, dtype, with_hp),
        empty_amax(scaling, gate),
    ),
)
_backward = register_pair(
    "swiglu_backward(Tensor grad_hidden, Tensor gate, Tensor up, bool packed) -> (Tensor, Tensor)",
    reference.swiglu_backward,
    lambda grad_hidden, gate, up, packed: reference.empty_gradients(gate, packed),
)
_backward_to_fp8 = register_pair(
    "swiglu_backward_to_fp8(Tensor grad_hidden, Tensor gate, Tensor up, str scaling, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "ScalarType dtype, float fp8_max, bool with_hp) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.swiglu_backward_to_fp8,
    lambda grad_hidden, gate, up, scaling, s0, i0, a0, s1, i1, a1, dtype, fp8_max, with_hp: tuple(
        one for _ in range(2) for one in empty_output(gate, scaling, dtype, with_hp)
    ),
)
_columns = register_pair(
    "swiglu_columns(Tensor gate, Tensor up, Tensor? gate_kept, Tensor? up_kept, str scaling, Tensor? scale, "
    "Tensor? scale_inv, Tensor? amax, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)",
    reference.swiglu_columns,
    lambda gate, up, gate_kept, up_kept, scaling, scale, scale_inv, amax, dtype, fp8_max: (
        gate.new_empty((gate.shape[1], gate.shape[0]), dtype=dtype),
        gate.new_empty((), dtype=torch.float32),
    ),
)


def _fake_backward_and_columns(
    grad_hidden: Tensor, gate: Tensor, up: Tensor, gate_kept: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    num_rows, num_cols = gate.shape
    dtype, _, grad_dtype, _ = rest[-4:]
    columns, grads = (num_cols if gate_kept is None else 0, num_rows), (num_rows, num_cols)
    fp8s = [gate.new_empty(columns, dtype=dtype), *(gate.new_empty(grads, dtype=grad_dtype) for _ in range(2))]
    return tuple(one for x_fp8 in fp8s for one in (x_fp8, gate.new_empty((), dtype=torch.float32)))


_backward_and_columns = register_pair(
    "swiglu_backward_and_columns(Tensor grad_hidden, Tensor gate, Tensor up, Tensor? gate_kept, Tensor? up_kept, "
    "str scaling, Tensor? scale, Tensor? scale_inv, Tensor? amax, Tensor? gate_scale, "
    "Tensor? gate_scale_inv, Tensor(a!)? gate_amax, Tensor? up_scale, Tensor? up_scale_inv, Tensor(b!)? up_amax, "
    "ScalarType dtype, float fp8_max, ScalarType grad_dtype, float grad_max) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.swiglu_backward_and_columns,
    _fake_backward_and_columns,
)


def _values_and_scales(gate: _Factor, up: _Factor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check gate and up; return the values of both and the scales of both."""
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


def _check(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> None:
    check_rows("gate", gate)
    check_rows("up", up, gate)
    check_rows("grad_hidden", grad_hidden, gate)


def _one_scale_each(*scalings: Scaling) -> tuple[str, list[SlotTensors]]:
    """Return the one mode of all, and their slots; a slot that is there records."""
    modes, slots = zip(*map(mode_of, scalings), strict=True)
    if len(set(modes)) > 1 or modes[0] == "rowwise":
        raise ValueError(
            f"scalings: expected AmaxSlots or 'tensorwise' for all, got {modes} ('given': a slot). Quantise the bf16 "
            "values by scales of another kind."
        )
    return modes[0], list(slots)


def swiglu(
    gate: Tensor, up: Tensor, fmt: Float8Format, scaling: Scaling, *, record: bool = True, with_hp: bool = False
) -> tuple[Fp8Output, Tensor | None]:
    """Compute `silu(gate) * up` in FP8, and in bf16 too if `with_hp`.

    Args:
        gate: bf16 [T, F], rows without gaps, any stride between them.
        up: the same.
        fmt: E4M3 or E5M2.
        scaling: see `Scaling`.
        record: with a slot: whether its amax_local takes the maximum (training), or is left (evaluation).
        with_hp: whether the bf16 values are written too.

    Returns:
        (output, amax): amax is float32, 0-dim, where it was measured, in "tensorwise"; else None.

    Raises:
        ValueError: another dtype, shape, layout, format or scaling.
    """
    check_rows("gate", gate)
    check_rows("up", up, gate)
    mode, slot = mode_of(scaling, record)
    x_fp8, scale_inv, hp, amax = _swiglu(gate, up, mode, *slot, fmt.torch_dtype, fmt.max, with_hp)
    return Fp8Output(x_fp8, scale_inv, hp if with_hp else None), amax if mode == "tensorwise" else None


def swiglu_backward(grad_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `silu(gate) * up`.

    Args:
        grad_hidden: bf16 [T, F]: gradient of the output; layout as for gate.
        gate: bf16 [T, F], rows without gaps, any stride between them.
        up: the same.

    Returns:
        (grad_gate, grad_up): bf16 [T, F], contiguous.
    """
    _check(grad_hidden, gate, up)
    return _backward(grad_hidden, gate, up, False)


def swiglu_backward_packed(grad_hidden: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate_up [T, 2F] (gate first): bf16 [T, 2F], contiguous. Args: as in `swiglu_backward`."""
    check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [T, 2F], got {tuple(gate_up.shape)}. Pass gate and up side by side.")
    gate, up = gate_up.chunk(2, dim=1)
    _check(grad_hidden, gate, up)
    return _backward(grad_hidden, gate, up, True)[0]


def swiglu_backward_to_fp8(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: Float8Format,
    scalings: tuple[Scaling, Scaling],
    *,
    with_hp: bool = False,
) -> tuple[Fp8Output, Fp8Output]:
    """Compute (grad_gate, grad_up) in FP8, each by one scale; the rest is as in `swiglu` and `swiglu_backward`.

    Args:
        scalings: scalings of grad_gate and of grad_up: slots, which record, or "tensorwise" for both.
    """
    _check(grad_hidden, gate, up)
    mode, (of_gate, of_up) = _one_scale_each(*scalings)
    found = _backward_to_fp8(
        grad_hidden, gate, up, mode, *of_gate, *of_up, fmt.torch_dtype, fmt.max, with_hp
    )  # fmt: skip
    outputs = [Fp8Output(x_fp8, scale_inv, hp if with_hp else None) for x_fp8, scale_inv, hp in (found[:3], found[3:])]
    return outputs[0], outputs[1]


def swiglu_columns(
    gate: _Factor,
    up: _Factor,
    fmt: Float8Format,
    scaling: AmaxSlot | Literal["tensorwise"],
    *,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute only the transpose of what `swiglu` makes: (`fmt.dtype` [F, T], scale_inv); nothing is recorded.

    Args: as in `swiglu`; one scale for all, and
        gate: bf16, or codes and scales of `ops.blockwise.quantize_groupwise`, read as their dequantised values.
        up: the same.
        amax: float32, 0-dim, as `swiglu` measured it of the same tensors: "tensorwise" then reads them only once.
    """
    values = _values_and_scales(gate, up)
    mode, (slot,) = _one_scale_each(scaling)
    return _columns(*values, mode, *slot[:2], amax, fmt.torch_dtype, fmt.max)


def swiglu_backward_kept(
    grad_hidden: Tensor,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    fmt: Float8Format,
    scalings: tuple[Scaling, Scaling],
) -> tuple[Fp8Output, Fp8Output, Tensor | None]:
    """Compute `swiglu_backward_to_fp8` of gate and up as `ops.blockwise.quantize_groupwise` keeps them.

    Returns:
        (grad_gate, grad_up, amax of the product for `swiglu_columns`, float32, 0-dim; None: not tensorwise).
    """
    values = _values_and_scales(gate, up)
    check_rows("grad_hidden", grad_hidden, values[0])
    mode, (of_gate, of_up) = _one_scale_each(*scalings)
    formats = (fmt.torch_dtype, fmt.max) * 2
    found = _backward_and_columns(grad_hidden, *values, mode, None, None, None, *of_gate, *of_up, *formats)
    amax = found[1] if mode == "tensorwise" else None
    return Fp8Output(found[2], found[3], None), Fp8Output(found[4], found[5], None), amax


def swiglu_backward_and_columns(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    formats: tuple[Float8Format, Float8Format],
    scalings: tuple[Scaling, Scaling, Scaling],
    *,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Fp8Output, Fp8Output]:
    """Compute `swiglu_columns` and `swiglu_backward_to_fp8` in one read of gate, up and grad_hidden; the same bits.

    Args: as there, and
        formats: format of the product and that of the gradients.
        scalings: those of the product, of grad_gate and of grad_up: slots, of which the last two record, or
            "tensorwise" for all.

    Returns:
        (product transposed, `formats[0].dtype` [F, T]; its scale_inv; grad_gate; grad_up), the gradients without `hp`.
    """
    _check(grad_hidden, gate, up)
    mode, (product, of_gate, of_up) = _one_scale_each(*scalings)
    found = _backward_and_columns(
        grad_hidden, gate, up, None, None, mode, *product[:2], amax, *of_gate, *of_up,
        formats[0].torch_dtype, formats[0].max, formats[1].torch_dtype, formats[1].max,
    )  # fmt: skip
    return found[0], found[1], Fp8Output(found[2], found[3], None), Fp8Output(found[4], found[5], None)
