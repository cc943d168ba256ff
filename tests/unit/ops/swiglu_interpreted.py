"""The SwiGLU kernels in Triton's interpreter against the reference. test_interpreted.py runs this file in a child.

NumPy's exp and torch's differ in the last bit: bf16 within the bounds of `ops.swiglu`, and FP8 exactly of that bf16.
"""

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

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops._producer import mode_of, quantize_by
from fp8_ds.ops.blockwise import quantize_groupwise
from fp8_ds.ops.blockwise.reference import dequantize_groupwise
from fp8_ds.ops.swiglu import reference
from fp8_ds.ops.swiglu import triton as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where infinities arise

NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1), (2, 2100)]
LONG = 16384 + 40
ONE_SCALE = [scaling for scaling in SCALINGS if scaling != "rowwise"]


def assert_output(expected, output, mode, slot, fmt):
    """hp within the bound; x_fp8 and scale_inv, and what is recorded, exactly those of the kernel's own hp."""
    assert_within_steps(expected, output[2], share=0.01, steps=2)
    _, fresh = mode_of(make_scaling(mode), slot.amax_local is not None)
    for a, b in zip(quantize_by(output[2], mode, fresh, fmt.dtype, fmt.max), output[:2], strict=True):
        assert_same(a, b)
    if slot.amax_local is not None:
        assert_same(fresh.amax_local, slot.amax_local)


def run_forward(gate, up, scaling, fmt=E4M3, record=True):
    mode, slot = mode_of(make_scaling(scaling), record)
    *output, amax = kernels.swiglu(gate, up, mode, *slot, fmt.dtype, fmt.max, True)
    if mode == "tensorwise":
        assert_same(output[2].abs().amax().float(), amax)
    assert_output(reference.hidden(gate, up), output, mode, slot, fmt)
    return output


def run_backward(grad, gate, up, scaling, fmt=E5M2):
    (mode, one), (_, two) = mode_of(make_scaling(scaling)), mode_of(make_scaling(scaling))
    found = kernels.swiglu_backward_to_fp8(grad, gate, up, mode, *one, *two, fmt.dtype, fmt.max, True)
    expected = reference.gradients(grad, gate, up)
    assert_output(expected[0], found[:3], mode, one, fmt)
    assert_output(expected[1], found[3:], mode, two, fmt)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_is_the_reference_within_its_bounds(shape, scaling):
    gate, up = make_gate(*shape), make_rows(*shape, seed=1)
    run_forward(gate, up, scaling, E4M3)
    run_forward(gate, up, scaling, E5M2)


@pytest.mark.parametrize("scaling", ONE_SCALE)
def test_backward_is_the_reference_within_its_bounds(scaling):
    for shape, fmt in (((1, 2100), E5M2), ((3, 50), E4M3)):
        grad, gate, up = make_rows(*shape, seed=2), make_gate(*shape), make_rows(*shape, seed=1)
        run_backward(grad, gate, up, scaling, fmt)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_bf16_gradients_are_the_reference_within_their_bounds(packed):
    shape = (2, 2100)
    arguments = make_rows(*shape, seed=2), make_gate(*shape), make_rows(*shape, seed=1), packed
    for a, b in zip(reference.swiglu_backward(*arguments), kernels.swiglu_backward(*arguments), strict=True):
        assert_within_steps(a, b, share=0.01, steps=2)


def test_rows_longer_than_registers_hold_are_scaled_by_their_whole():
    """The largest of row 0 lies in its first block, that of row 1 in its last."""
    gate, up = make_gate(2, LONG), make_rows(2, LONG, 1)
    for row, column in ((0, 3), (1, LONG - 1)):
        gate[row, column] = up[row, column] = 70.0
    run_forward(gate, up, "rowwise")


def test_views_of_wider_tensors_are_read_by_their_strides():
    gate, up, grad = make_gate(6, 300)[::2, 40:240], make_rows(3, 444, 1)[:, :200], make_rows(1, 200, 2).expand(3, 200)
    run_forward(gate, up, "rowwise")
    run_backward(grad, gate, up, "tensorwise")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_edges_are_those_of_the_reference(scaling):
    """Zeros, subnormals, gates far from zero, products that overflow, infinities and NaN."""
    gate, up, grad = make_gate(6, 33), make_rows(6, 33, 1), make_rows(6, 33, 2)
    gate[0] = 0
    up[1] = 2.0**-133
    gate[2] = torch.tensor([-3e38, -200.0, -0.0, 200.0, 3e38]).bfloat16().repeat(7)[:33]
    gate[3, 1], gate[3, 2], gate[3, 3] = NAN, INF, -INF
    up[4], gate[4] = 3e38, 3.0
    up[5, 5], grad[5, 6] = INF, NAN
    for rows in (slice(0, 3), slice(3, 6)):
        run_forward(gate[rows], up[rows], scaling)
        if scaling != "rowwise":
            run_backward(grad[rows], gate[rows], up[rows], scaling)


def test_amax_is_maximumed_only_when_recorded():
    run_forward(make_gate(3, 50), make_rows(3, 50, 1), "given", record=False)


def test_no_bf16_is_written_unless_asked_for():
    gate, up = make_gate(3, 50), make_rows(3, 50, 1)
    mode, slot = mode_of("tensorwise")
    tail = (E4M3.dtype, E4M3.max, False)
    x_fp8, _, hp, _ = kernels.swiglu(gate, up, mode, *slot, *tail)
    assert_same(run_forward(gate, up, "tensorwise")[0], x_fp8)
    assert hp.shape == (0,)
    outputs = kernels.swiglu_backward_to_fp8(up, gate, up, mode, *slot, *slot, *tail)
    assert outputs[2].shape == outputs[5].shape == (0,) and outputs[0].shape == (3, 50)


TILES = [(1, 1), (70, 130), (80, 48), (16, 16)]
"""One element; tiles cut at odd places; whole vectors, cut and not. A tile takes the interpreter seconds."""


def codes(x):
    return x.view(torch.uint8)


def assert_columns(gate, up, scaling, fmt):
    """Those of the rows' kernel, transposed, bit for bit, with their scale; nothing is recorded."""
    (mode, slot), (_, fresh) = mode_of(make_scaling(scaling)), mode_of(make_scaling(scaling))
    rows, scale_inv, _, amax = kernels.swiglu(gate, up, mode, *fresh[:2], None, fmt.dtype, fmt.max, False)
    for known in (None, amax)[: 1 + (mode == "tensorwise")]:
        columns, columns_scale_inv = kernels.swiglu_columns(
            gate, up, None, None, mode, *slot[:2], known, fmt.dtype, fmt.max
        )
        assert columns.is_contiguous() and columns.shape == (gate.shape[1], gate.shape[0])
        assert_same(codes(rows).t(), codes(columns))
        assert_same(scale_inv, columns_scale_inv)
    if mode == "given":
        assert_same(fresh.amax_local, slot.amax_local)


@pytest.mark.parametrize(
    ("shape", "scaling"), [((66, 20), "given"), ((64, 128), "tensorwise"), ((48, 32), "tensorwise")]
)
def test_columns_of_a_few_tiles_are_those_of_the_rows(shape, scaling):
    """Cut at odd places, whole, and by whole vectors; what is not finite spoils its scale."""
    gate, up = make_gate(*shape), make_rows(*shape, seed=1)
    if scaling == "given":
        gate[65, 19] = INF
    assert_columns(gate, up, scaling, E4M3)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ONE_SCALE)
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_columns_are_those_of_the_rows(shape, scaling):
    gate, up = make_gate(*shape), make_rows(*shape, seed=1)
    for fmt in (E4M3, E5M2):
        assert_columns(gate, up, scaling, fmt)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ONE_SCALE)
def test_columns_of_views_and_of_what_is_not_finite(scaling):
    gate, up = make_gate(6, 300)[::2, 40:240], make_rows(3, 444, 1)[:, :200]
    assert_columns(gate, up, scaling, E4M3)
    for place in ((0, 0), (2, 199)):
        gate, up = make_gate(3, 200), make_rows(3, 200, 1)
        gate[place] = INF
        assert_columns(gate, up, scaling, E4M3)


def assert_columns_beside_gradients(grad, gate, up, scaling, is_kept):
    """All of it as by the kernels of bf16 rows, bit for bit, recorded amaxes included; kept in FP8, one by one."""
    mode = "given" if scaling == "given" else "tensorwise"
    kept = [quantize_groupwise(x) for x in (gate, up)] if is_kept else None
    if kept is not None:
        gate, up = (dequantize_groupwise(*one) for one in kept)

    def slots():
        return [mode_of(make_scaling(scaling))[1] for _ in range(3)]

    own, other = slots(), slots()
    formats = (E4M3.dtype, E4M3.max), (E5M2.dtype, E5M2.max)
    amax = None if mode == "given" else amax_of(gate, up)
    amaxes = [None] if amax is None else [None, amax]
    expected = kernels.swiglu_columns(gate, up, None, None, mode, *own[0][:2], amax, *formats[0])
    rows = kernels.swiglu_backward_to_fp8(grad, gate, up, mode, *own[1], *own[2], *formats[1], False)
    expected = [*expected, *rows[:2], *rows[3:5]]
    tail = (*other[1], *other[2], *formats[0], *formats[1])
    if kept is not None:
        factors = kept[0][0], kept[1][0], kept[0][1], kept[1][1]
        none, measured, *grads = kernels.swiglu_backward_and_columns(grad, *factors, mode, None, None, None, *tail)
        assert none.numel() == 0
        if amax is not None:
            assert_same(measured, amax)
        found = [
            [*kernels.swiglu_columns(*factors, mode, *other[0][:2], known, *formats[0]), *grads] for known in amaxes
        ]
    else:
        plain = (grad, gate, up, None, None, mode, *other[0][:2])
        found = [kernels.swiglu_backward_and_columns(*plain, known, *tail) for known in amaxes]
    for got in found:
        for a, b in zip(expected, got, strict=True):
            assert_same(a, b)
    if mode == "given":
        for a, b in zip(own, other, strict=True):
            assert_same(a.amax_local, b.amax_local)


def amax_of(gate, up):
    """Of the kernel's product: NumPy's exp is not torch's."""
    return kernels.swiglu(gate, up, "tensorwise", None, None, None, E4M3.dtype, E4M3.max, False)[3]


@pytest.mark.parametrize(
    ("shape", "scaling", "is_kept"),
    [
        ((66, 20), "given", False),
        ((32, 128), "tensorwise", True),
        ((48, 130), "given", True),
        ((33, 20), "given", True),
    ],
)
def test_columns_beside_gradients_are_those_of_their_own_kernels(shape, scaling, is_kept):
    gate, up, grad = make_gate(*shape), make_rows(*shape, seed=1), make_rows(*shape, seed=2)
    if scaling == "given":
        grad[3, 4] = INF
        gate[1, 2] = NAN if is_kept else INF
    gate[5, 7:9], up[6], gate[7], up[7] = -0.0, 2.0**-133, 2.0**-70, 2.0**-60
    assert_columns_beside_gradients(grad, gate, up, scaling, is_kept)


@pytest.mark.parametrize("row", range(4))
def test_the_largest_is_seen_in_each_of_the_four_rows_of_a_word(row):
    gate, up, grad = make_gate(4, 20), make_rows(4, 20, seed=1), make_rows(4, 20, seed=2)
    gate[row, 7], up[row, 7] = 70.0, 1e6
    assert_columns_beside_gradients(grad, gate, up, "tensorwise", True)
    gate[row, 7] = INF
    assert_columns(gate, up, "given", E4M3)


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("scaling", ONE_SCALE)
@pytest.mark.parametrize("shape", [*TILES, (130, 256)], ids=str)
def test_columns_beside_gradients_of_any_shape(shape, scaling, is_kept):
    gate, up, grad = make_gate(*shape), make_rows(*shape, seed=1), make_rows(*shape, seed=2)
    assert_columns_beside_gradients(grad, gate, up, scaling, is_kept)
