"""The SwiGLU kernels against the reference on a CPU.

Neither NumPy's exp nor CUDA's is torch's: bf16 is within the bounds of `ops.swiglu`, and FP8 exactly of that bf16.
"""

import pytest
import torch
from support.kernels import DEVICE, KERNEL, assert_all_same, to_device, with_cuda_sizes
from support.producers import SCALINGS, assert_same, assert_within_steps, make_gate, make_rows, make_scaling

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops._producer import mode_of, quantize_by
from fp8_ds.ops.blockwise import quantize_groupwise
from fp8_ds.ops.blockwise.reference import dequantize_groupwise
from fp8_ds.ops.swiglu import reference
from fp8_ds.ops.swiglu import triton as kernels

pytestmark = KERNEL

NAN, INF = float("nan"), float("inf")
LONG = 16384 + 40
ONE_SCALE = [scaling for scaling in SCALINGS if scaling != "rowwise"]
CUDA_SHAPES = [(64, 4096), (33, 5120), (17, 8200), (3, 16384), (700, 2048), (2, 53248)]
TAIL = (E4M3.dtype, E4M3.max)


def operands(*shape):
    """gate, up, grad"""
    return make_gate(*shape), make_rows(*shape, seed=1), make_rows(*shape, seed=2)


def slot_of(scaling, record=True):
    return mode_of(make_scaling(scaling, DEVICE), record)


def assert_output(expected, output, mode, slot, fmt):
    """hp within the bound; x_fp8 and scale_inv, and what is recorded, exactly those of the kernel's own hp."""
    assert_within_steps(expected, output[2], share=0.01, steps=2)
    _, fresh = mode_of(make_scaling(mode), slot.amax_local is not None)
    assert_all_same(quantize_by(output[2].cpu(), mode, fresh, fmt.dtype, fmt.max), output[:2])
    if slot.amax_local is not None:
        assert_same(fresh.amax_local, slot.amax_local)


def run_forward(gate, up, scaling, fmt=E4M3, record=True, view=lambda x: x):
    mode, slot = slot_of(scaling, record)
    moved = [view(x) for x in to_device(gate, up)]
    *output, amax = kernels.swiglu(*moved, mode, *slot, fmt.dtype, fmt.max, True)
    if mode == "tensorwise":
        assert_same(output[2].abs().amax().float(), amax)
    assert_output(reference.hidden(view(gate), view(up)), output, mode, slot, fmt)
    return output


def run_backward(grad, gate, up, scaling, fmt=E5M2, view=lambda x: x):
    (mode, one), (_, two) = slot_of(scaling), slot_of(scaling)
    moved = [view(x) for x in to_device(grad, gate, up)]
    found = kernels.swiglu_backward_to_fp8(*moved, mode, *one, *two, fmt.dtype, fmt.max, True)
    expected = reference.gradients(view(grad), view(gate), view(up))
    assert_output(expected[0], found[:3], mode, one, fmt)
    assert_output(expected[1], found[3:], mode, two, fmt)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", with_cuda_sizes([(1, 1), (2, 2100)], CUDA_SHAPES), ids=str)
def test_forward_is_the_reference_within_its_bounds(shape, scaling):
    gate, up, _ = operands(*shape)
    run_forward(gate, up, scaling, E4M3)
    run_forward(gate, up, scaling, E5M2)


@pytest.mark.parametrize("scaling", ONE_SCALE)
@pytest.mark.parametrize(
    ("shape", "fmt"), with_cuda_sizes([((1, 2100), E5M2), ((3, 50), E4M3)], [(shape, E5M2) for shape in CUDA_SHAPES])
)
def test_backward_is_the_reference_within_its_bounds(shape, fmt, scaling):
    gate, up, grad = operands(*shape)
    run_backward(grad, gate, up, scaling, fmt)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("shape", with_cuda_sizes([(2, 2100)], CUDA_SHAPES))
def test_bf16_gradients_are_the_reference_within_their_bounds(shape, packed):
    gate, up, grad = operands(*shape)
    found = kernels.swiglu_backward(*to_device(grad, gate, up), packed)
    for a, b in zip(reference.swiglu_backward(grad, gate, up, packed), found, strict=True):
        assert_within_steps(a, b, share=0.01, steps=2)


def test_rows_longer_than_registers_hold_are_scaled_by_their_whole():
    """The largest of row 0 lies in its first block, that of row 1 in its last."""
    gate, up, _ = operands(2, LONG)
    for row, column in ((0, 3), (1, LONG - 1)):
        gate[row, column] = up[row, column] = 70.0
    run_forward(gate, up, "rowwise")


@pytest.mark.parametrize(
    "view", [lambda x: x[::2, 40:240], lambda x: x[:, 1:201], lambda x: x[:1, :200].expand(3, 200)]
)
def test_views_of_wider_tensors_are_read_by_their_strides(view):
    gate, up, grad = operands(6, 300)
    run_forward(gate, up, "rowwise", view=view)
    run_backward(grad, gate, up, "tensorwise", view=view)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_edges_are_those_of_the_reference(scaling):
    """Zeros, subnormals, gates far from zero, products that overflow, infinities and NaN."""
    gate, up, grad = operands(6, 33)
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


def test_every_gate_gives_silu_within_its_bounds():
    """All bf16 numbers; where |gate| > 87, zero may stand for what is below 2**-118, and NaN and infinity agree."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, -1)
    ones, moderate = torch.ones_like(gate), gate.float().abs() <= 80
    expected = reference.hidden(gate, ones)
    got = kernels.swiglu(*to_device(gate, ones), "rowwise", None, None, None, *TAIL, True)[2].cpu()
    assert_within_steps(expected[moderate], got[moderate], share=0.01)
    far = [tensor[~moderate].float() for tensor in (expected, got)]
    torch.testing.assert_close(*far, rtol=2**-7, atol=2.0**-118, equal_nan=True)


@pytest.mark.parametrize("num_gates", with_cuda_sizes([1], [128]))
def test_products_of_two_bf16_numbers_equal_the_reference_bitwise(num_gates):
    """The last product is one of bf16 numbers: every `up` by many a silu, which is gate / 2 of so small a gate. Most
    are below 2**-126 or rounded to what is."""
    up = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = torch.exp2(-26 - torch.arange(128.0) * 101 / 128) * (1 + torch.arange(128) * 37 % 128 / 128)
    gate[1::2] *= -1
    gate = gate.bfloat16()[-num_gates:, None].expand(-1, len(up)).contiguous()
    up = up.expand_as(gate).contiguous()
    got = kernels.swiglu(*to_device(gate, up), *slot_of("given")[:1], *slot_of("given")[1], *TAIL, True)[2]
    assert_same(reference.hidden(gate, up), got)


def test_no_bf16_is_written_unless_asked_for():
    gate, up, _ = operands(3, 50)
    mode, slot = slot_of("tensorwise")
    moved = to_device(gate, up)
    x_fp8, _, hp, _ = kernels.swiglu(*moved, mode, *slot, *TAIL, False)
    assert_same(run_forward(gate, up, "tensorwise")[0], x_fp8)
    assert hp.shape == (0,)
    outputs = kernels.swiglu_backward_to_fp8(moved[1], *moved, mode, *slot, *slot, *TAIL, False)
    assert outputs[2].shape == outputs[5].shape == (0,) and outputs[0].shape == (3, 50)


def assert_columns(gate, up, scaling, fmt=E4M3, view=lambda x: x):
    """Those of the rows' kernel, transposed, bit for bit, with their scale; nothing is recorded."""
    (mode, slot), (_, fresh) = slot_of(scaling), slot_of(scaling)
    gate, up = (view(x) for x in to_device(gate, up))
    rows, scale_inv, _, amax = kernels.swiglu(gate, up, mode, *fresh[:2], None, fmt.dtype, fmt.max, False)
    for known in (None, amax)[: 1 + (mode == "tensorwise")]:
        columns, columns_scale_inv = kernels.swiglu_columns(
            gate, up, None, None, mode, *slot[:2], known, fmt.dtype, fmt.max
        )
        assert columns.is_contiguous() and columns.shape == (gate.shape[1], gate.shape[0])
        assert_same(rows.view(torch.uint8).t(), columns.view(torch.uint8))
        assert_same(scale_inv, columns_scale_inv)
    if mode == "given":
        assert_same(fresh.amax_local, slot.amax_local)


@pytest.mark.parametrize(
    ("shape", "scaling"),
    with_cuda_sizes(
        [((66, 20), "given"), pytest.param((64, 128), "tensorwise", marks=pytest.mark.slow), ((48, 32), "tensorwise")],
        [(shape, scaling) for shape in ((1, 1), (70, 130), (4096, 512), (8192, 14336)) for scaling in ONE_SCALE],
    ),
)
def test_columns_are_those_of_the_rows(shape, scaling):
    """Cut at odd places, whole, and by whole vectors; what is not finite spoils its scale."""
    gate, up, _ = operands(*shape)
    if scaling == "given":
        gate[-1, -1] = INF
    assert_columns(gate, up, scaling)


def assert_columns_beside_gradients(grad, gate, up, scaling, is_kept):
    """All of it as by the kernels of bf16 rows, bit for bit, recorded amaxes included; kept in FP8, one by one."""
    mode = "given" if scaling == "given" else "tensorwise"
    kept = [to_device(*quantize_groupwise(x)) for x in (gate, up)] if is_kept else None
    grad, gate, up = to_device(grad, gate, up)
    if kept is not None:
        gate, up = (dequantize_groupwise(*one) for one in kept)
    own, other = ([slot_of(scaling)[1] for _ in range(3)] for _ in range(2))
    formats = TAIL, (E5M2.dtype, E5M2.max)
    # Of the kernel's product: its exp is not torch's.
    amax = None if mode == "given" else kernels.swiglu(gate, up, mode, None, None, None, *TAIL, False)[3]
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
        assert_all_same(expected, got)
    if mode == "given":
        for a, b in zip(own, other, strict=True):
            assert_same(a.amax_local, b.amax_local)


@pytest.mark.parametrize(
    ("shape", "scaling", "is_kept"),
    with_cuda_sizes(
        [
            ((66, 20), "given", False),
            ((32, 128), "tensorwise", True),
            pytest.param((48, 130), "given", True, marks=pytest.mark.slow),
            ((33, 20), "given", True),
        ],
        [
            (shape, scaling, is_kept)
            for shape in ((70, 130), (130, 256), (4096, 1792))
            for scaling in ONE_SCALE
            for is_kept in (False, True)
        ],
    ),
)
def test_columns_beside_gradients_are_those_of_their_own_kernels(shape, scaling, is_kept):
    gate, up, grad = operands(*shape)
    if scaling == "given":
        grad[3, 4] = INF
        gate[1, 2] = NAN if is_kept else INF
    gate[5, 7:9], up[6], gate[7], up[7] = -0.0, 2.0**-133, 2.0**-70, 2.0**-60
    assert_columns_beside_gradients(grad, gate, up, scaling, is_kept)


@pytest.mark.parametrize("row", [0, *(pytest.param(row, marks=pytest.mark.slow) for row in (1, 2)), 3])
def test_the_largest_is_seen_in_each_of_the_four_rows_of_a_word(row):
    gate, up, grad = operands(4, 20)
    gate[row, 7], up[row, 7] = 70.0, 1e6
    assert_columns_beside_gradients(grad, gate, up, "tensorwise", True)
    gate[row, 7] = INF
    assert_columns(gate, up, "given")
