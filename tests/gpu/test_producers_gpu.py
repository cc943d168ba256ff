"""RMSNorm and SwiGLU into FP8 on CUDA against the references on CPU copies; memory, capture, no waiting."""

import gc

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
from fp8_ds.ops.blockwise import dequantize_groupwise, quantize_groupwise
from fp8_ds.ops.rmsnorm import MAX_COLS, rmsnorm, rmsnorm_backward
from fp8_ds.ops.rmsnorm import reference as rmsnorm_reference
from fp8_ds.ops.swiglu import reference as swiglu_reference
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_and_columns,
    swiglu_backward_kept,
    swiglu_backward_packed,
    swiglu_backward_to_fp8,
    swiglu_columns,
)
from fp8_ds.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

NAN, INF = float("nan"), float("inf")
FORMATS = [E4M3, E5M2]
SHAPES = [(1, 1), (3, 7), (5, 1000), (64, 4096), (33, 5120), (17, 8200), (2, 14336), (3, 16384), (2, MAX_COLS)]
ROUNDINGS = ["once", "twice"]


def weight_of(num_cols, dtype=torch.bfloat16):
    return (torch.randn(num_cols, generator=torch.Generator().manual_seed(7)) + 1).to(dtype)


def assert_rmsnorm_equal(x, weight, scaling, fmt=E4M3, rounding="once", record=True):
    scalings, results = (make_scaling(scaling), make_scaling(scaling, "cuda")), []
    for one, device in zip(scalings, ("cpu", "cuda"), strict=True):
        tensors = x.to(device), weight.to(device)
        output, rstd = rmsnorm(*tensors, 1e-5, fmt, one, record=record, rounding=rounding)
        results.append((*output, rstd))
    for a, b in zip(*results, strict=True):
        assert_same(a, b)
    if scaling == "given":
        assert_same(scalings[0].amax_local, scalings[1].amax_local)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rmsnorm_equals_cpu_reference_bitwise(shape, scaling, rounding):
    for fmt, dtype in ((E4M3, torch.bfloat16), (E5M2, torch.float32)):
        assert_rmsnorm_equal(make_rows(*shape), weight_of(shape[1], dtype), scaling, fmt, rounding)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rmsnorm_of_8192_rows_equals_cpu_reference_bitwise(scaling):
    """More programs than a device holds at once, and their atomic maxima."""
    assert_rmsnorm_equal(make_rows(8192, 1024), weight_of(1024), scaling)


@pytest.mark.parametrize("scaling", ["given", "rowwise"])
@pytest.mark.parametrize("shape", [(1601, 4096), (601, 5120), (600, 8192), (301, 16384), (300, MAX_COLS)], ids=str)
def test_rmsnorm_of_several_rows_a_program_equals_cpu_reference_bitwise(shape, scaling):
    """The largest, and then what is not finite, in first, middle and last turns."""
    x = make_rows(*shape)
    x[7], x[8, 1::2] = -0.0, 0.0
    for row in (0, shape[0] // 2, shape[0] - 1):
        x[row, -1] = 1e6 + 1e5 * row
        assert_rmsnorm_equal(x, weight_of(shape[1]), scaling)
    x[-1, 3], x[shape[0] // 2, 3], x[0, 3] = INF, NAN, -INF
    assert_rmsnorm_equal(x, weight_of(shape[1]), scaling, E5M2, "twice")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_edges_of_rmsnorm_equal_cpu_reference_bitwise(scaling):
    """Zeros, bf16's subnormals, squares below and above float32, a NaN, infinities."""
    rows = make_rows(8, 40)
    rows[0] = 0
    rows[1] = torch.tensor([2.0**-133, -(2.0**-130)]).bfloat16().repeat(20)
    rows[2] = 2.0**-75
    rows[3] = 2.0**100
    rows[4, 3] = NAN
    rows[5, 4] = INF
    rows[6, 5] = -INF
    for x in (rows[:4], rows[4:], rows):
        assert_rmsnorm_equal(x, weight_of(40), scaling)


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_every_rounding_of_the_cast_equals_cpu_reference_bitwise(fmt):
    """All finite bf16 numbers by a scale of 1: halfway cases, subnormals of FP8, saturation."""
    from fp8_ds.ops._device import FROM_AMAX  # triton is missing where there is no GPU
    from fp8_ds.ops.rmsnorm.kernel import rmsnorm_kernel

    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite(), bits, 0).view(4, -1)
    mode, slot = mode_of(make_scaling("given", scale=1.0))
    expected = quantize_by(x, mode, slot, fmt.dtype, fmt.max)[0]
    # rstd is 1 in the second pass of tensorwise, whose amax stands for a scale of 1: the values themselves are cast.
    got, ones, cuda = torch.empty_like(expected, device="cuda"), torch.ones(x.shape[1], device="cuda"), x.cuda()
    rmsnorm_kernel[(4,)](
        cuda, ones, got.view(torch.uint8), torch.empty_like(cuda), ones, torch.empty((), device="cuda"),
        torch.tensor(fmt.max, device="cuda"), x.shape[1], x.stride(0), 0.0, MODE=FROM_AMAX, TWICE=False,
        FP8_MAX=fmt.max, BLOCK=16384, PTX=True, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    assert_same(expected, got)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_rows_at_any_alignment_equal_cpu_reference_bitwise(offset):
    wide = make_rows(9, 4200)
    cuda = wide.cuda()
    weight = weight_of(4096)
    for rows in (slice(0, 9), slice(0, 9, 2)):
        expected, rstd = rmsnorm(wide[rows, offset : offset + 4096], weight, 1e-5, E4M3, "rowwise")
        got, cuda_rstd = rmsnorm(cuda[rows, offset : offset + 4096], weight.cuda(), 1e-5, E4M3, "rowwise")
        assert_same(expected.x_fp8, got.x_fp8)
        assert_same(rstd, cuda_rstd)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 4096), (8200, 512), (4300, 4096), (2200, 8192)], ids=str)
def test_rmsnorm_backward_equals_cpu_reference_bitwise(shape, dtype):
    """Of the last two a program takes several partial sums."""
    x, grad = (make_rows(*shape, seed) for seed in range(2))
    arguments = grad, x, weight_of(shape[1], dtype), rmsnorm_reference.rstd_of(x, 1e-5)
    expected = rmsnorm_backward(*arguments)
    cuda = [one.cuda() for one in arguments]
    for a, b, again in zip(expected, rmsnorm_backward(*cuda), rmsnorm_backward(*cuda), strict=True):
        assert_same(a, b)
        assert_same(b, again)


def assert_output(expected_hp, output, scaling, fmt, slot):
    """hp within the bound of `ops.swiglu`; x_fp8, scale_inv and what is recorded are exactly those of that hp."""
    assert_within_steps(expected_hp, output.hp, share=0.01, steps=2)
    mode, fresh = mode_of(make_scaling(scaling))
    x_fp8, scale_inv = quantize_by(output.hp.cpu(), mode, fresh, fmt.dtype, fmt.max)
    assert_same(x_fp8, output.x_fp8)
    assert_same(scale_inv, output.scale_inv)
    if scaling == "given":
        assert_same(fresh.amax_local, slot.amax_local)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 2048), (2, 53248)], ids=str)
def test_swiglu_is_the_cpu_reference_within_its_bounds(shape, scaling):
    gate, up, grad = make_gate(*shape), make_rows(*shape, seed=1), make_rows(*shape, seed=2)
    cuda_gate, cuda_up, cuda_grad = gate.cuda(), up.cuda(), grad.cuda()
    gate_up = torch.cat([cuda_gate, cuda_up], dim=1)
    one, two = make_scaling(scaling, "cuda"), make_scaling(scaling, "cuda")
    output, _ = swiglu(*gate_up.chunk(2, dim=1), E4M3, one, with_hp=True)
    assert_output(swiglu_reference.hidden(gate, up), output, scaling, E4M3, one)
    assert_same(output.x_fp8, swiglu(cuda_gate, cuda_up, E4M3, make_scaling(scaling, "cuda"))[0].x_fp8)

    expected = swiglu_reference.gradients(grad, gate, up)
    grads = swiglu_backward(cuda_grad, cuda_gate, cuda_up)
    for a, b in zip(expected, grads, strict=True):
        assert_within_steps(a, b, share=0.01, steps=2)
    assert_same(torch.cat(grads, dim=1), swiglu_backward_packed(cuda_grad, gate_up))
    if scaling != "rowwise":
        one = make_scaling(scaling, "cuda")
        outputs = swiglu_backward_to_fp8(cuda_grad, cuda_gate, cuda_up, E5M2, (one, two), with_hp=True)
        for a, b, output, slot in zip(expected, grads, outputs, (one, two), strict=True):
            assert_output(a, output, scaling, E5M2, slot)
            assert_same(b, output.hp)


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_one_fp8_code_in_a_thousand_differs_from_the_cpu_reference_at_most(fmt):
    gate, up, grad = make_gate(512, 4096), make_rows(512, 4096, 1), make_rows(512, 4096, 2)
    expected, _ = swiglu(gate, up, fmt, make_scaling("given"))
    got, _ = swiglu(gate.cuda(), up.cuda(), fmt, make_scaling("given", "cuda"))
    assert_within_steps(expected.x_fp8, got.x_fp8, share=0.001)
    slots, cuda_slots = ([make_scaling("given", device) for _ in range(2)] for device in ("cpu", "cuda"))
    grads = swiglu_backward_to_fp8(grad, gate, up, fmt, tuple(slots))
    cuda_grads = swiglu_backward_to_fp8(grad.cuda(), gate.cuda(), up.cuda(), fmt, tuple(cuda_slots))
    for a, b in zip(grads, cuda_grads, strict=True):
        assert_within_steps(a.x_fp8, b.x_fp8, share=0.001)


def test_every_gate_gives_silu_within_its_bounds():
    """All bf16 numbers; where |gate| > 87, zero may stand for what is below 2**-118, and NaN and infinity agree."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, -1)
    ones = torch.ones_like(gate)
    moderate = gate.float().abs() <= 80
    for fmt in FORMATS:
        expected = swiglu(gate, ones, fmt, "rowwise", with_hp=True)[0].hp
        got = swiglu(gate.cuda(), ones.cuda(), fmt, "rowwise", with_hp=True)[0].hp.cpu()
        assert_within_steps(expected[moderate], got[moderate], share=0.01)
        far = [tensor[~moderate].float() for tensor in (expected, got)]
        torch.testing.assert_close(*far, rtol=2**-7, atol=2.0**-118, equal_nan=True)


def test_products_of_two_bf16_numbers_equal_the_cpu_reference_bitwise():
    """The last product is one of bf16 numbers: every `up` by many a silu, which is gate / 2 of so small a
    gate. Most are below 2**-126 or rounded to what is."""
    up = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = torch.exp2(-26 - torch.arange(128.0) * 101 / 128) * (1 + torch.arange(128) * 37 % 128 / 128)
    gate[1::2] *= -1
    gate = gate.bfloat16()[:, None].expand(-1, len(up)).contiguous()
    up = up.expand_as(gate).contiguous()
    expected = swiglu_reference.hidden(gate, up)
    assert ((expected != 0) & (expected.abs() < 2.0**-126)).sum() > 50000
    got = swiglu(gate.cuda(), up.cuda(), E4M3, make_scaling("given", "cuda"), with_hp=True)[0].hp
    assert_same(expected, got)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_non_finite_values_of_swiglu_are_seen_in_what_their_scale_covers(scaling):
    gate, up = make_gate(6, 333), make_rows(6, 333, 1)
    gate[1, 1], gate[2, 2], gate[3, 3], up[4, 4] = NAN, INF, -INF, INF
    output, _ = swiglu(gate.cuda(), up.cuda(), E4M3, make_scaling(scaling, "cuda"))
    poisoned = output.scale_inv.isnan().view(-1).tolist()
    assert poisoned == ([False, True, True, True, True, False] if scaling == "rowwise" else [True])


def test_backward_of_swiglu_leaves_fp8_close_to_autograd():
    gate, up, grad = torch.randn(3, 300, 1536, generator=torch.Generator().manual_seed(3)).bfloat16()
    truth_gate, truth_up = gate.double().requires_grad_(), up.double().requires_grad_()
    truth = torch.autograd.grad(torch.nn.functional.silu(truth_gate) * truth_up, (truth_gate, truth_up), grad.double())
    for true, output in zip(
        truth, swiglu_backward_to_fp8(grad.cuda(), gate.cuda(), up.cuda(), E4M3, ("tensorwise",) * 2), strict=True
    ):
        assert sqnr_db(true, (output.x_fp8.float() * output.scale_inv).cpu()) > 30  # E4M3: about 31.6 dB


def all_producers(gate, up, weight, slots):
    """One call of each op in each scaling; the outputs in a row."""
    results = []
    for scaling in (slots[0], "rowwise", "tensorwise"):
        output, rstd = rmsnorm(gate, weight, 1e-5, E4M3, scaling)
        results += [*output[:2], *swiglu(gate, up, E4M3, scaling)[0][:2]]
        if scaling != "rowwise":
            grads = swiglu_backward_to_fp8(up, gate, up, E5M2, slots if scaling is slots[0] else (scaling, scaling))
            results += [*grads[0][:2], *grads[1][:2]]
    return [*results, *rmsnorm_backward(up, gate, weight, rstd), *swiglu_backward(up, gate, up)]


def fresh_inputs():
    gate, up = make_gate(256, 4096).cuda(), make_rows(256, 4096, 1).cuda()
    return gate, up, weight_of(4096).cuda(), tuple(make_scaling("given", "cuda") for _ in range(2))


def test_compiled_without_a_graph_break_the_bytes_are_the_same():
    eager, compiled = fresh_inputs(), fresh_inputs()
    expected = all_producers(*eager)
    for a, b in zip(expected, torch.compile(all_producers, fullgraph=True)(*compiled), strict=True):
        assert_same(a, b)
    for a, b in zip(eager[3], compiled[3], strict=True):
        assert a.amax_local == b.amax_local > 0


def test_a_captured_graph_replays_as_eager_calls():
    inputs = fresh_inputs()
    expected = all_producers(*inputs)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_producers(*inputs)
    for slot in inputs[3]:
        slot.amax_local.zero_()
    graph.replay()
    for a, b in zip(expected, captured, strict=True):
        assert_same(a, b)
    assert all(slot.amax_local > 0 for slot in inputs[3])


def test_no_call_waits_for_the_device():
    inputs = fresh_inputs()
    all_producers(*inputs)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_producers(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_producer_allocates_its_outputs_and_next_to_nothing_else(scaling):
    gate, up, weight, (slot, _) = fresh_inputs()
    chosen = slot if scaling == "given" else scaling
    for call, num_bytes in (
        (lambda: rmsnorm(gate, weight, 1e-5, E4M3, chosen), 3),
        (lambda: swiglu(gate, up, E4M3, chosen), 1),
    ):
        call()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        assert torch.cuda.max_memory_allocated() - before <= num_bytes * gate.numel() + 8192


@pytest.mark.parametrize("scaling", ["given", "tensorwise"])
@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (4096, 512), (8192, 14336)], ids=str)
def test_columns_are_those_of_the_rows_bitwise(shape, scaling):
    gate, up = make_gate(*shape, 0).cuda(), make_rows(*shape, 1).cuda()
    for places in ((), ((0, 0), (shape[0] - 1, shape[1] - 1))):
        for place in places:
            gate[place] = INF
        rows, measured = swiglu(gate, up, E4M3, make_scaling(scaling, "cuda"), record=False)
        for amax in [None] if scaling == "given" else [None, measured]:
            one = make_scaling(scaling, "cuda")
            columns, scale_inv = swiglu_columns(gate, up, E4M3, one, amax=amax)
            assert_same(rows.x_fp8.view(torch.uint8).t(), columns.view(torch.uint8))
            assert_same(rows.scale_inv, scale_inv)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("scaling", ["given", "tensorwise"])
@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (4096, 1792)], ids=str)
def test_columns_beside_gradients_are_those_of_their_own_kernels_bitwise(shape, scaling, is_kept):
    gate, up, grad = make_gate(*shape, 0).cuda(), make_rows(*shape, 1).cuda(), make_rows(*shape, 2).cuda()
    for place in (None, (0, 0), (shape[0] - 1, shape[1] - 1)):
        if place is not None:
            gate[place] = INF
        factors = [quantize_groupwise(x) if is_kept else x for x in (gate, up)]
        plain = [dequantize_groupwise(*one) if is_kept else one for one in factors]
        own, other = ([make_scaling(scaling, "cuda") for _ in range(3)] for _ in range(2))
        columns, scale_inv = swiglu_columns(*plain, E4M3, own[0])
        rows = swiglu_backward_to_fp8(grad, *plain, E5M2, tuple(own[1:]))
        amax = swiglu(*plain, E4M3, own[0], record=False)[1]
        for known in (None, amax):
            if is_kept:
                *both, found = swiglu_backward_kept(grad, *factors, E5M2, tuple(other[1:]))
                assert (found is None) == (amax is None)
                got = *swiglu_columns(*factors, E4M3, other[0], amax=known), *both
                if amax is not None:
                    assert_same(found, amax)
            else:
                got = swiglu_backward_and_columns(grad, *factors, (E4M3, E5M2), tuple(other), amax=known)
            assert_same(columns, got[0])
            assert_same(scale_inv, got[1])
            for one, another in zip(rows, got[2:], strict=True):
                assert_same(one.x_fp8, another.x_fp8)
                assert_same(one.scale_inv, another.scale_inv)
        if scaling == "given":
            for one, another in zip(own, other, strict=True):
                assert_same(one.amax_local, another.amax_local)
