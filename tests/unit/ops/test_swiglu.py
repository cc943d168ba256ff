"""SwiGLU into FP8: against the modules it stands for, edges, gradients; the kernels in a child process."""

import pytest
import torch
from support.producers import (
    SCALINGS,
    assert_same,
    assert_within_steps,
    make_gate,
    make_rows,
    make_scaling,
    make_slot,
)
from torch.nn.functional import silu

from fp8_ds.formats import E4M3, E4M4, E5M2
from fp8_ds.ops.groupwise import dequantize_groupwise, quantize_groupwise
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_and_columns,
    swiglu_backward_kept,
    swiglu_backward_packed,
    swiglu_backward_packed_to_fp8,
    swiglu_backward_to_fp8,
    swiglu_columns,
    swiglu_with_amax,
)
from fp8_ds.testing import sqnr_db

NAN, INF = float("nan"), float("inf")
T, F = 23, 88
GATE, UP, GRAD = make_gate(T, F), make_rows(T, F, 1), make_rows(T, F, 2)


def test_bf16_is_that_of_the_eager_and_of_the_fused_module():
    gate, up = make_gate(300, 200, 5), make_rows(300, 200, 6)
    eager = silu(gate) * up
    fused = (silu(gate.float()) * up.float()).bfloat16()
    for expected, rounding in ((eager, "twice"), (fused, "once")):
        hp = swiglu(gate, up, E4M3, "rowwise", rounding=rounding, with_hp=True).hp
        assert_within_steps(expected, hp, share=1e-3, steps=2 if rounding == "twice" else 1)
    assert (eager != fused).float().mean() > 0.05


def test_gradients_are_those_of_autograd_on_the_eager_module():
    gate, up, grad = make_gate(300, 200, 5), make_rows(300, 200, 6), make_rows(300, 200, 7)
    gate.requires_grad_()
    up.requires_grad_()
    expected = torch.autograd.grad(silu(gate) * up, (gate, up), grad)
    got = swiglu_backward(grad, gate.detach(), up.detach(), rounding="twice")
    for a, b in zip(expected, got, strict=True):
        assert_within_steps(a, b, share=1e-3, steps=2)


def test_gradients_rounded_once_have_the_rounding_of_bf16_alone():
    """About 52 dB; rounded twice, less."""
    gate, up = GATE.double().requires_grad_(), UP.double().requires_grad_()
    truth = torch.autograd.grad(silu(gate) * up, (gate, up), GRAD.double())
    once, twice = (swiglu_backward(GRAD, GATE, UP, rounding=rounding) for rounding in ("once", "twice"))
    for true, a, b in zip(truth, once, twice, strict=True):
        assert a.dtype == torch.bfloat16 and a.is_contiguous()
        assert sqnr_db(true, a) > max(50, sqnr_db(true, b))


def assert_quantised(output, fmt, scaling, slot):
    """`x_fp8` and `scale_inv` are those of `hp` through ops/quantize."""
    assert output.x_fp8.is_contiguous() and output.x_fp8.dtype == fmt.dtype
    if scaling == "given":
        assert_same((output.hp.float() * slot.scale).clamp(-fmt.max, fmt.max).to(fmt.dtype), output.x_fp8)
        assert output.scale_inv == slot.scale_inv and slot.amax_local == output.hp.abs().max()
    elif scaling == "tensorwise":
        for got, expected in zip(output, quantize_tensorwise(output.hp, fmt), strict=False):
            assert_same(expected, got)
    else:
        for i, row in enumerate(output.hp):
            x_fp8, scale_inv = quantize_tensorwise(row, fmt)
            assert_same(x_fp8, output.x_fp8[i])
            assert_same(scale_inv.view(1), output.scale_inv[i])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_fp8_is_the_quantised_bf16(scaling, fmt):
    one, two = make_scaling(scaling), make_scaling(scaling, scale=0.9)
    assert_quantised(swiglu(GATE, UP, fmt, one, with_hp=True), fmt, scaling, one)
    assert swiglu(GATE, UP, fmt, one).hp is None
    one = make_scaling(scaling)
    grads = swiglu_backward_to_fp8(GRAD, GATE, UP, fmt, (one, two) if scaling == "given" else scaling, with_hp=True)
    for expected, output, slot in zip(swiglu_backward(GRAD, GATE, UP), grads, (one, two), strict=True):
        assert_same(expected, output.hp)
        assert_quantised(output, fmt, scaling, slot)
    one = make_scaling(scaling)
    gate_up = torch.cat([GATE, UP], dim=1)
    packed = swiglu_backward_packed_to_fp8(GRAD, gate_up, fmt, one, with_hp=True)
    assert_same(swiglu_backward_packed(GRAD, gate_up), packed.hp)
    assert_quantised(packed, fmt, scaling, one)


def test_halves_of_a_packed_tensor_give_the_bytes_of_two_tensors():
    gate_up = torch.cat([GATE, UP], dim=1)
    gate, up = gate_up.chunk(2, dim=1)
    for a, b in zip(swiglu(GATE, UP, E4M3, "rowwise")[:2], swiglu(gate, up, E4M3, "rowwise")[:2], strict=True):
        assert_same(a, b)
    assert_same(torch.cat(swiglu_backward(GRAD, GATE, UP), dim=1), swiglu_backward_packed(GRAD, gate_up))


def test_evaluation_leaves_the_recorded_amax():
    slots = make_slot(amax=0.5), make_slot(amax=0.25)
    swiglu(GATE, UP, E4M3, slots[0], record=False)
    swiglu_backward_to_fp8(GRAD, GATE, UP, E5M2, slots, record=False)
    swiglu_backward_packed_to_fp8(GRAD, torch.cat([GATE, UP], dim=1), E5M2, slots[0], record=False)
    assert [slot.amax_local.item() for slot in slots] == [0.5, 0.25]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_non_finite_gate_is_seen_in_what_its_scale_covers(scaling, bad):
    gate = GATE.clone()
    gate[5, 7] = bad
    poisoned = swiglu(gate, UP, E4M3, make_scaling(scaling)).scale_inv.isnan()
    assert poisoned.sum() == 1 and poisoned.view(-1)[5 if scaling == "rowwise" else 0]


def test_a_non_finite_up_spoils_the_gradient_of_gate_alone():
    up = UP.clone()
    up[5, 7] = INF
    grad_gate, grad_up = swiglu_backward_to_fp8(GRAD, GATE, up, E5M2, "tensorwise")
    assert grad_gate.scale_inv.isnan() and grad_up.scale_inv.isfinite()


def test_gates_far_from_zero_are_zero_or_themselves():
    gate = torch.tensor([[-3e38, -200.0, -0.0, 0.0, 200.0, 3e38]]).bfloat16()
    hp = swiglu(gate, torch.ones_like(gate), E5M2, "rowwise", with_hp=True).hp
    assert hp.tolist() == [[0.0, 0.0, 0.0, 0.0, *gate[0, 4:].tolist()]]
    grad_gate, grad_up = swiglu_backward(torch.ones_like(gate), gate, torch.ones_like(gate))
    assert grad_gate.tolist() == [[0.0, 0.0, 0.5, 0.5, 1.0, 1.0]]
    assert_same(hp, grad_up)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0)], ids=str)
def test_no_elements_are_no_work(shape, scaling):
    empty = torch.empty(shape, dtype=torch.bfloat16)
    output = swiglu(empty, empty, E4M3, make_scaling(scaling), with_hp=True)
    assert output.x_fp8.shape == output.hp.shape == shape
    assert output.scale_inv.shape == ((shape[0], 1) if scaling == "rowwise" else ())
    scalings = (make_slot(), make_slot()) if scaling == "given" else scaling
    assert [one.x_fp8.shape for one in swiglu_backward_to_fp8(empty, empty, empty, E5M2, scalings)] == [shape, shape]
    assert swiglu_backward_packed(empty, torch.cat([empty, empty], dim=1)).shape == (shape[0], 2 * shape[1])
    if scaling != "given":
        assert (output.scale_inv == (2.0**-126 if scaling == "rowwise" else 1)).all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"gate: expected bfloat16 \[T, C\], got torch.float32"):
        swiglu(GATE.float(), UP, E4M3, "rowwise")
    with pytest.raises(ValueError, match=r"up: expected bfloat16 \(23, 88\), got torch.bfloat16 \(22, 88\)"):
        swiglu(GATE, UP[1:], E4M3, "rowwise")
    with pytest.raises(ValueError, match="gate: expected rows without gaps"):
        swiglu(GATE.t(), UP.t(), E4M3, "rowwise")
    with pytest.raises(ValueError, match="grad_hidden: expected bfloat16"):
        swiglu_backward(GRAD[:, 1:], GATE, UP)
    with pytest.raises(ValueError, match=r"gate_up: expected \[T, 2F\], got \(23, 87\)"):
        swiglu_backward_packed(GRAD, GATE[:, 1:])
    with pytest.raises(ValueError, match="got e4m4"):
        swiglu(GATE, UP, E4M4, "rowwise")
    with pytest.raises(ValueError, match="scaling: expected an AmaxSlot"):
        swiglu_backward_to_fp8(GRAD, GATE, UP, E5M2, "delayed")
    with pytest.raises(ValueError, match="rounding: expected"):
        swiglu_backward(GRAD, GATE, UP, rounding="never")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_ops_pass_opcheck(scaling, packed):
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.fp8_ds
    slot, other, none = make_slot(), make_slot(), (None,) * 3
    one = (slot.scale, slot.scale_inv, slot.amax_local) if scaling == "given" else none
    two = (other.scale, other.scale_inv, other.amax_local) if scaling == "given" and not packed else none
    tail = (True, E5M2.dtype, E5M2.max, False, packed)
    torch.library.opcheck(ops.swiglu.default, (GATE, UP, scaling, *one, *tail), test_utils=checks)
    torch.library.opcheck(ops.swiglu_backward.default, (GRAD, GATE, UP, packed, False), test_utils=checks)
    arguments = (GRAD, GATE, UP, packed, scaling, *one, *two, *tail)
    torch.library.opcheck(ops.swiglu_backward_to_fp8.default, arguments, test_utils=checks)
    if scaling != "rowwise":
        arguments = (GATE, UP, None, None, scaling, *one[:2], None, *tail[1:4])
        torch.library.opcheck(ops.swiglu_columns.default, arguments, test_utils=checks)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_without_a_graph_break_the_bytes_are_the_same(scaling):
    def all_of_them(gate, up, grad, one, two):
        grads = swiglu_backward_to_fp8(grad, gate, up, E5M2, (one, two) if scaling == "given" else one)
        return *swiglu(gate, up, E4M3, one)[:2], *grads[0][:2], *grads[1][:2], *swiglu_backward(grad, gate, up)

    eager = [make_scaling(scaling), make_scaling(scaling)]
    compiled = [make_scaling(scaling), make_scaling(scaling)]
    expected = all_of_them(GATE, UP, GRAD, *eager)
    got = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")(GATE, UP, GRAD, *compiled)
    for a, b in zip(expected, got, strict=True):
        assert_same(a, b)
    if scaling == "given":
        assert all(a.amax_local == b.amax_local > 0 for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("scaling", ["given", "tensorwise"])
def test_columns_are_the_rows_transposed(scaling):
    product, columns = make_scaling(scaling), make_scaling(scaling)
    expected, amax = swiglu_with_amax(GATE, UP, E4M3, product, record=False, rounding="twice")
    got, scale_inv = swiglu_columns(GATE, UP, E4M3, columns, rounding="twice")
    assert_same(expected.x_fp8.view(torch.uint8).t(), got.view(torch.uint8))
    assert_same(expected.scale_inv, scale_inv)
    assert (amax is None) == (scaling == "given")


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("scaling", ["given", "tensorwise"])
def test_the_op_of_columns_beside_gradients_passes_opcheck(scaling, is_kept):
    slots = [(slot.scale, slot.scale_inv, slot.amax_local) for slot in (make_slot() for _ in range(3))]
    product, gate, up = slots if scaling == "given" else [(None,) * 3] * 3
    values, scales = zip(*(quantize_groupwise(x) if is_kept else (x, None) for x in (GATE, UP)), strict=True)
    tail = (True, E4M3.dtype, E4M3.max, E5M2.dtype, E5M2.max, True)
    torch.library.opcheck(
        torch.ops.fp8_ds.swiglu_backward_and_columns.default,
        (GRAD, *values, *scales, scaling, *product[:2], None, *gate, *up, *tail),
        test_utils=("test_faketensor",) if is_kept else ("test_schema", "test_faketensor"),  # torch's fails on FP8
    )


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("scaling", ["given", "tensorwise"])
def test_columns_beside_gradients_are_both_ops_at_once(scaling, is_kept):
    own, other = ([make_scaling(scaling) for _ in range(3)] for _ in range(2))
    factors = [quantize_groupwise(x) if is_kept else x for x in (GATE, UP)]
    gate, up = (dequantize_groupwise(*one) if is_kept else one for one in factors)
    columns = swiglu_columns(gate, up, E4M3, own[0], rounding="twice")
    grads = swiglu_backward_to_fp8(
        GRAD, gate, up, E5M2, tuple(own[1:]) if scaling == "given" else "tensorwise", rounding="twice"
    )
    if is_kept:
        *both, amax = swiglu_backward_kept(GRAD, *factors, E5M2, tuple(other[1:]), rounding="twice")
        assert (amax is None) == (scaling == "given")
        if amax is not None:
            assert_same(amax, swiglu_with_amax(gate, up, E4M3, scaling, rounding="twice")[1])
        got = *swiglu_columns(*factors, E4M3, other[0], rounding="twice", amax=amax), *both
    else:
        got = swiglu_backward_and_columns(GRAD, *factors, (E4M3, E5M2), tuple(other), rounding="twice")
    for a, b in zip([*columns, *grads[0][:2], *grads[1][:2]], [*got[:2], *got[2][:2], *got[3][:2]], strict=True):
        assert_same(a, b)
    assert got[2].hp is got[3].hp is None
    if scaling == "given":
        assert all(a.amax_local == b.amax_local for a, b in zip(own, other, strict=True))
        assert other[0].amax_local == 0 < other[1].amax_local, "of the product nothing is recorded"


def test_columns_beside_gradients_refuse_what_they_cannot_read():
    codes, scales = quantize_groupwise(GATE)
    three = ("tensorwise",) * 3
    with pytest.raises(ValueError, match=r"up: expected float8_e4m3fn \[T, C\]"):
        swiglu_backward_kept(GRAD, (codes, scales), (UP, scales), E5M2, three[:2])
    with pytest.raises(ValueError, match="up: expected to be kept as gate is"):
        swiglu_columns((codes, scales), UP, E4M3, "tensorwise")
    with pytest.raises(ValueError, match="grad_hidden: expected bfloat16"):
        swiglu_backward_and_columns(GRAD[1:], GATE, UP, (E4M3, E5M2), three)
    slot = make_scaling("given")
    for scalings in (
        ("rowwise",) * 3,
        ("rowwise", *three[:2]),
        (slot, *three[:2]),
        ("tensorwise", slot, slot),
        (slot, slot, "tensorwise"),
    ):
        with pytest.raises(ValueError, match="expected AmaxSlots or 'tensorwise' for all"):
            swiglu_backward_and_columns(GRAD, GATE, UP, (E4M3, E5M2), scalings)
    with pytest.raises(ValueError, match="up: expected scales with the strides of gate's"):
        swiglu_columns((codes, scales), (codes, scales.repeat(1, 2)[:, :1]), E4M3, "tensorwise")


def test_columns_have_one_scale():
    with pytest.raises(ValueError, match="expected an AmaxSlot or 'tensorwise', got 'rowwise'"):
        swiglu_columns(GATE, UP, E4M3, "rowwise")
