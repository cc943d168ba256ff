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
)
from torch.nn.functional import silu

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import dequantize_groupwise, quantize_groupwise
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_and_columns,
    swiglu_backward_kept,
    swiglu_backward_packed,
    swiglu_backward_to_fp8,
    swiglu_columns,
)

NAN, INF = float("nan"), float("inf")
ONE_SCALE = [scaling for scaling in SCALINGS if scaling != "rowwise"]
T, F = 23, 88
GATE, UP, GRAD = make_gate(T, F), make_rows(T, F, 1), make_rows(T, F, 2)


def test_bf16_is_that_of_the_eager_module():
    gate, up = make_gate(300, 200, 5), make_rows(300, 200, 6)
    eager = silu(gate) * up
    hp = swiglu(gate, up, E4M3, "rowwise", with_hp=True)[0].hp
    assert_within_steps(eager, hp, share=1e-3, steps=2)
    rounded_once = (silu(gate.float()) * up.float()).bfloat16()
    assert (hp != rounded_once).float().mean() > 0.05


def test_gradients_are_those_of_autograd_on_the_eager_module():
    gate, up, grad = make_gate(300, 200, 5), make_rows(300, 200, 6), make_rows(300, 200, 7)
    gate.requires_grad_()
    up.requires_grad_()
    expected = torch.autograd.grad(silu(gate) * up, (gate, up), grad)
    got = swiglu_backward(grad, gate.detach(), up.detach())
    for a, b in zip(expected, got, strict=True):
        assert_within_steps(a, b, share=1e-3, steps=2)


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
    one = make_scaling(scaling)
    assert_quantised(swiglu(GATE, UP, fmt, one, with_hp=True)[0], fmt, scaling, one)
    assert swiglu(GATE, UP, fmt, one)[0].hp is None


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ONE_SCALE)
def test_fp8_gradients_are_the_quantised_bf16(scaling, fmt):
    slots = make_scaling(scaling), make_scaling(scaling, scale=0.9 if scaling == "given" else 3.7)
    grads = swiglu_backward_to_fp8(GRAD, GATE, UP, fmt, slots, with_hp=True)
    for expected, output, slot in zip(swiglu_backward(GRAD, GATE, UP), grads, slots, strict=True):
        assert_same(expected, output.hp)
        assert_quantised(output, fmt, scaling, slot)
    assert swiglu_backward_to_fp8(GRAD, GATE, UP, fmt, slots)[1].hp is None


def test_halves_of_a_packed_tensor_give_the_bytes_of_two_tensors():
    gate_up = torch.cat([GATE, UP], dim=1)
    gate, up = gate_up.chunk(2, dim=1)
    for a, b in zip(swiglu(GATE, UP, E4M3, "rowwise")[0][:2], swiglu(gate, up, E4M3, "rowwise")[0][:2], strict=True):
        assert_same(a, b)
    assert_same(torch.cat(swiglu_backward(GRAD, GATE, UP), dim=1), swiglu_backward_packed(GRAD, gate_up))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_non_finite_gate_is_seen_in_what_its_scale_covers(scaling, bad):
    gate = GATE.clone()
    gate[5, 7] = bad
    poisoned = swiglu(gate, UP, E4M3, make_scaling(scaling))[0].scale_inv.isnan()
    assert poisoned.sum() == 1 and poisoned.view(-1)[5 if scaling == "rowwise" else 0]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0)], ids=str)
def test_no_elements_are_no_work(shape, scaling):
    empty = torch.empty(shape, dtype=torch.bfloat16)
    output, _ = swiglu(empty, empty, E4M3, make_scaling(scaling), with_hp=True)
    assert output.x_fp8.shape == output.hp.shape == shape
    assert output.scale_inv.shape == ((shape[0], 1) if scaling == "rowwise" else ())
    if scaling != "rowwise":
        grads = swiglu_backward_to_fp8(empty, empty, empty, E5M2, (make_scaling(scaling), make_scaling(scaling)))
        assert [one.x_fp8.shape for one in grads] == [shape, shape]
    assert swiglu_backward_packed(empty, torch.cat([empty, empty], dim=1)).shape == (shape[0], 2 * shape[1])
    if scaling != "given":
        assert (output.scale_inv == (2.0**-126 if scaling == "rowwise" else 1)).all()


@pytest.mark.parametrize("scaling", ONE_SCALE)
def test_columns_are_the_rows_transposed(scaling):
    product, columns = make_scaling(scaling), make_scaling(scaling)
    expected, amax = swiglu(GATE, UP, E4M3, product, record=False)
    got, scale_inv = swiglu_columns(GATE, UP, E4M3, columns)
    assert_same(expected.x_fp8.view(torch.uint8).t(), got.view(torch.uint8))
    assert_same(expected.scale_inv, scale_inv)
    assert (amax is None) == (scaling == "given")


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("scaling", ONE_SCALE)
def test_columns_beside_gradients_are_both_ops_at_once(scaling, is_kept):
    own, other = ([make_scaling(scaling) for _ in range(3)] for _ in range(2))
    factors = [quantize_groupwise(x) if is_kept else x for x in (GATE, UP)]
    gate, up = (dequantize_groupwise(*one) if is_kept else one for one in factors)
    columns = swiglu_columns(gate, up, E4M3, own[0])
    grads = swiglu_backward_to_fp8(GRAD, gate, up, E5M2, tuple(own[1:]))
    if is_kept:
        *both, amax = swiglu_backward_kept(GRAD, *factors, E5M2, tuple(other[1:]))
        assert (amax is None) == (scaling == "given")
        if amax is not None:
            assert_same(amax, swiglu(gate, up, E4M3, scaling)[1])
        got = *swiglu_columns(*factors, E4M3, other[0], amax=amax), *both
    else:
        got = swiglu_backward_and_columns(GRAD, *factors, (E4M3, E5M2), tuple(other))
    for a, b in zip([*columns, *grads[0][:2], *grads[1][:2]], [*got[:2], *got[2][:2], *got[3][:2]], strict=True):
        assert_same(a, b)
    assert got[2].hp is got[3].hp is None
    if scaling == "given":
        assert all(a.amax_local == b.amax_local for a, b in zip(own, other, strict=True))
        assert other[0].amax_local == 0 < other[1].amax_local, "of the product nothing is recorded"
