"""Quantisation and transpose kernels on CUDA against the references on CPU copies, bit for bit; memory, no waiting.

The hardware's conversion gives every NaN a positive sign: NaNs are compared as such.
"""

import pytest
import torch
from support import many_scales
from support.waits import host_waits

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import (
    LAYOUTS,
    quantize,
    quantize_and_transpose_delayed,
    quantize_and_transpose_measured,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_part,
    quantize_rowwise,
    quantize_tensorwise,
    record_amax,
)
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart
from fp8_ds.ops.transpose import transpose
from fp8_ds.testing import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

FORMATS = [E4M3, E5M2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 5), (16, 16), (80, 144), (67, 35), (33, 16), (16, 9), (304, 4096), (40, 16400), (2, 40005)]
NAN, INF = float("nan"), float("inf")
SCALE = torch.tensor(3.7)


def assert_equal(expected, got):
    """`got` lies on CUDA, or is None where `expected` is."""
    for a, b in zip(expected, got, strict=True):
        if a is None:
            assert b is None
            continue
        b = b.cpu()
        is_nan = a.float().isnan()
        assert torch.equal(is_nan, b.float().isnan())
        keep = ~is_nan
        assert_bitwise(*(t.view(torch.uint8)[keep] if t.element_size() == 1 else t[keep] for t in (a, b)))


def matrix(num_rows, num_cols, dtype=torch.bfloat16):
    return many_scales("per_tile", num_rows, num_cols, seed=num_rows).to(dtype)


def amax(x):
    measured = torch.zeros((), device=x.device)
    record_amax(x, measured)
    return measured


def check(function, *args, **keys):
    """On CPU tensors, which take the reference, and on copies of them on CUDA."""
    on_cuda = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    expected, got = function(*args, **keys), function(*on_cuda, **keys)
    assert_equal(*((result,) if isinstance(result, torch.Tensor) else result for result in (expected, got)))


@pytest.mark.parametrize("dtype", [E4M3.dtype, E5M2.dtype, torch.int8])
@pytest.mark.parametrize("shape", [*SHAPES, (7, 32), (65, 130), (4096, 14336), (0, 5), (5, 0)])
def test_transpose_moves_every_byte_value_to_its_place(shape, dtype):
    x = (torch.arange(shape[0] * shape[1]) % 257 % 256).to(torch.uint8).reshape(shape)
    assert_bitwise(transpose(x.cuda().view(dtype)).cpu().view(torch.uint8), x.t().contiguous())


def test_transpose_takes_tensors_that_begin_anywhere():
    codes = torch.arange(300, dtype=torch.int16).to(torch.uint8)
    for start in (0, 1, 4, 8, 16):
        x = codes[start : start + 256].view(16, 16)
        assert_bitwise(transpose(codes.cuda()[start : start + 256].view(16, 16)).cpu(), x.t().contiguous())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**9, 97.3])
def test_cast_equals_reference_for_every_16_bit_number_and_many_float32(scale, fmt):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    random = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    halfway = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, halfway, halfway * (1 + 2**-23), halfway * (1 - 2**-24), -halfway])
    for x in (every.view(torch.bfloat16), every.view(torch.float16), random.view(torch.float32), near):
        check(quantize, x, torch.tensor(scale), fmt)
        check(
            quantize_and_transpose_measured, x.reshape(1, -1), torch.tensor(scale), torch.tensor(1 / scale), fmt, "both"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_references_for_every_dtype_and_shape(shape, dtype):
    x, rows, cols = matrix(*shape, dtype), torch.rand(shape[0]), torch.rand(shape[1])
    check(amax, x)
    for fmt in FORMATS if dtype == torch.bfloat16 else [E4M3]:
        check(quantize, x, SCALE, fmt)
        check(quantize_tensorwise, x, fmt)
        check(quantize_rowwise, x, fmt)
        check(quantize_rowwise, x, fmt, cols)
        check(quantize_colwise_t, x, fmt)
        check(quantize_colwise_t, x, fmt, rows)
        for layout in LAYOUTS:
            check(quantize_and_transpose_measured, x, SCALE, 1 / SCALE, fmt, layout)
            check(quantize_and_transpose_tensorwise, x, fmt, layout)


@pytest.mark.parametrize("num_cols", [4096, 4112])
def test_columns_of_64_mib_and_of_more_equal_reference(num_cols):
    """Which lets go of what it reads, and which does not."""
    check(quantize_colwise_t, matrix(8192, num_cols), E4M3)
    check(quantize_colwise_t, matrix(8192, num_cols), E5M2, torch.rand(8192))


def test_a_tensor_of_more_than_two_to_the_31_elements_is_cast_to_its_end():
    x = torch.zeros((1 << 17) + 16, 1 << 14, dtype=torch.bfloat16, device="cuda")
    x[-1, -1], x[-1, 0] = -3.0, 1.0
    row, col, scale_inv = quantize_and_transpose_tensorwise(x, E4M3, "both")
    torch.testing.assert_close(scale_inv.item(), 3.0 / 448.0, rtol=1e-6, atol=0)
    assert row[-1, 0].float() > 0 and col[0, -1].float() > 0
    for x_fp8 in (row, col, transpose(row), quantize_rowwise(x, E4M3)[0], quantize_colwise_t(x, E4M3)[0]):
        assert x_fp8[-1, -1].float() == -448.0
    assert amax(x) == 3.0


@pytest.mark.parametrize("at", [0, 12345, -1])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_broken_element_is_never_hidden(bad, at):
    x = matrix(304, 4096)
    x.view(-1)[at] = bad
    for layout in LAYOUTS:
        check(quantize_and_transpose_tensorwise, x, E4M3, layout)
    check(quantize_rowwise, x, E5M2)
    check(quantize_colwise_t, x, E5M2)
    measured = amax(x.cuda())
    assert measured.isnan() if bad != bad else measured == INF


@pytest.mark.parametrize("bad", [NAN, INF, 0.0])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("shape", [(304, 4096), (67, 35)])
def test_delayed_equals_reference(shape, record, bad):
    x = matrix(*shape)
    x[-1, 7] = bad
    for start in (0.25, 1e30):
        for layout in LAYOUTS:
            slots = torch.full((3,), start), torch.full((3,), start, device="cuda")
            results = []
            for device, slot in zip(("cpu", "cuda"), slots, strict=True):
                scales = SCALE.to(device), (1 / SCALE).to(device), slot[1]
                result = quantize_and_transpose_delayed(x.to(device), *scales, E4M3, layout, record=record)
                results.append((*result, slot))
            assert_equal(*results)


def test_recorded_amax_only_grows():
    slot = torch.tensor(5.0, device="cuda")
    for value, expected in ((3.0, 5.0), (-7.0, 7.0), (INF, INF), (1.0, INF), (NAN, NAN), (1.0, NAN)):
        record_amax(torch.full((100_000,), value, device="cuda", dtype=torch.bfloat16), slot)
        assert slot.isnan() if expected != expected else slot == expected


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 1e-39, 3e38])
def test_extreme_tensors_equal_reference(value):
    x = torch.full((32, 48), value)
    check(quantize_and_transpose_tensorwise, x, E4M3, "both")
    check(quantize_rowwise, x, E4M3)
    check(quantize_colwise_t, x, E4M3)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_matrices_have_scales_of_one(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    check(amax, x)
    check(quantize, x, SCALE, E4M3)
    check(quantize_tensorwise, x, E4M3)
    check(quantize_rowwise, x, E4M3)
    check(quantize_colwise_t, x, E4M3)
    for layout in LAYOUTS:
        check(quantize_and_transpose_tensorwise, x, E4M3, layout)


def test_tensors_that_begin_anywhere_and_other_layouts_equal_reference():
    flat = matrix(1, 64 * 64 + 8).flatten()
    on_cuda = flat.cuda()
    for start in (1, 2, 4, 8):
        views = [t[start : start + 64 * 64].view(64, 64) for t in (flat, on_cuda)]
        for fold in (None, torch.rand(64)):
            assert_equal(
                quantize_rowwise(views[0], E4M3, fold),
                quantize_rowwise(views[1], E4M3, None if fold is None else fold.cuda()),
            )
        assert_equal(
            quantize_and_transpose_tensorwise(views[0], E4M3, "both"),
            quantize_and_transpose_tensorwise(views[1], E4M3, "both"),
        )
    x = matrix(48, 32)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(5, 32)):
        assert_equal(quantize_tensorwise(view(x), E4M3), quantize_tensorwise(view(x.cuda()), E4M3))
    scale = torch.rand(48, 1)
    assert_equal((quantize(x, scale, E4M3),), (quantize(x.cuda(), scale.cuda(), E4M3),))


def test_compiled_functions_give_the_same_bits():
    def function(x, fold):
        row, col, scale_inv = quantize_and_transpose_tensorwise(x * 2, E4M3, "both")
        return row, col, scale_inv, transpose(row), *quantize_rowwise(x, E4M3, fold), *quantize_colwise_t(x, E5M2)

    x, fold = matrix(64, 96), torch.rand(96)
    assert_equal(function(x, fold), torch.compile(function, fullgraph=True)(x.cuda(), fold.cuda()))


def test_casts_replay_from_a_graph_as_they_run():
    x, slot = matrix(128, 256).cuda(), torch.zeros((), device="cuda")
    scale = SCALE.cuda()

    def casts():
        return (
            *quantize_and_transpose_tensorwise(x, E4M3, "both"),
            *quantize_and_transpose_delayed(x, scale, 1 / scale, slot, E5M2, "both", record=True),
            *quantize_rowwise(x, E4M3),
            *quantize_colwise_t(x, E4M3),
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        casts()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = casts()
    for factor in (1.0, 3.0, 0.1):
        x.mul_(factor)
        graph.replay()
        assert_equal([t.cpu() for t in casts()], captured)


def test_casts_never_wait_for_the_device_and_allocate_their_results_only():
    x, slot = torch.randn(2048, 4096, device="cuda").bfloat16(), torch.zeros((), device="cuda")
    scale, fold = SCALE.cuda(), torch.rand(4096, device="cuda")

    def casts():
        results = [quantize_and_transpose_tensorwise(x, E4M3, layout) for layout in LAYOUTS]
        results.append(quantize_and_transpose_delayed(x, scale, scale, slot, E4M3, "row", record=True))
        results += [quantize_rowwise(x, E4M3, fold), quantize_colwise_t(x, E4M3)]
        results.append(transpose(results[0][0]))
        return results

    casts()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = casts()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert len(results) == 7
    num_copies = 1 + 1 + 2 + 1 + 1 + 1 + 1
    assert torch.cuda.max_memory_allocated() - before < num_copies * x.numel() + (1 << 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "block"), [((304, 4096), (1, 4096)), ((300, 4100), (128, 128)), ((67, 35), (1, 35))])
def test_parts_by_a_grid_of_scales_equal_reference(shape, block, dtype):
    x = many_scales("per_tile", *shape).to(dtype).flatten()
    grid = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.5
    for start, end in ((0, x.numel()), (3, 1000), (128, 2000), (x.numel() - 700, x.numel())):
        expected = quantize_part(x[start:end].clone(), grid, start, shape[1], block, E4M3)
        got = quantize_part(x[start:end].clone().cuda(), grid.cuda(), start, shape[1], block, E4M3)
        assert_bitwise(got.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_parts_of_many_matrices_cast_at_once_equal_reference_and_touch_nothing_else(dtype, fmt):
    """One scale for all, for each row, for each tile; whole vectors and not; cut anywhere, also to nothing."""
    blocks = {(304, 4096): (1, 4096), (300, 4100): (128, 128), (67, 35): (1, 35), (64, 1 << 15): None}
    on_cpu, on_gpu, around = [], [], []
    for shape, block in blocks.items():
        x = many_scales("per_tile", *shape).to(dtype).flatten()
        size = () if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        grid = torch.rand(size) + 0.5
        for start, end in ((0, x.numel()), (3, 1000), (128, 2000), (x.numel() - 700, x.numel()), (7, 7)):
            for parts, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
                before, memory, after = torch.zeros(end - start + 32, dtype=torch.uint8, device=device).split(
                    [start % 16, end - start, 32 - start % 16]
                )
                around += [before, after]
                rest = start, shape[1], block or (1, 1)
                parts.append(QuantizePart(x.to(device)[start:end], memory.view(fmt.dtype), grid.to(device), *rest))
    cast = MultiTensorQuantize(on_gpu, fmt)
    assert len(cast._launches) == 6
    MultiTensorQuantize(on_cpu, fmt)()
    with host_waits() as waits:
        cast()
    assert waits.names == []
    for expected, got in zip(on_cpu, on_gpu, strict=True):
        assert_bitwise(got.out.cpu(), expected.out)
    assert not any(piece.any() for piece in around)
