"""What kernels have on CUDA alone: compiled and captured calls, memory, no waiting, threads, sizes of 2**31.

Their numbers are tested in kernels/, on CUDA and in Triton's interpreter.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import many_scales
from support.adam_shards import clone_shard, differences, make_grad, make_inputs, make_shard
from support.producers import assert_same, make_gate, make_rows, make_scaling
from support.waits import host_waits
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard, prepare
from fp8_ds.ops.blockwise import block_amax, quantize_blockwise, quantize_groupwise, transpose_blockwise
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise
from fp8_ds.ops.grouped import can_run, columns, columns_by_columns, reference, rows_by_matrices
from fp8_ds.ops.quantize import (
    quantize_and_transpose_delayed,
    quantize_and_transpose_tensorwise,
    quantize_colwise_t,
    quantize_rowwise,
    record_amax,
)
from fp8_ds.ops.rmsnorm import rmsnorm, rmsnorm_backward
from fp8_ds.ops.swiglu import swiglu, swiglu_backward, swiglu_backward_kept, swiglu_backward_to_fp8, swiglu_columns
from fp8_ds.ops.transpose import transpose
from fp8_ds.ops.weighted_sum import (
    weighted_sum,
    weighted_sum_backward,
    weighted_sum_backward_reference,
    weighted_sum_reference,
)
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.zero.release import ReleaseUpdater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ROWS, SQUARES = (1, 128), (128, 128)
needs_grouped = pytest.mark.skipif(not can_run(torch.device("cuda")), reason="needs compute capability 9, 10 or 11")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def quantizes(x: Tensor, fold: Tensor, slot: Tensor) -> tuple[Tensor | None, ...]:
    row, col, scale_inv = quantize_and_transpose_tensorwise(x, E4M3, "both")
    delayed = quantize_and_transpose_delayed(x, scale_inv, scale_inv, slot, E5M2, "both", record=True)
    rowwise, colwise = quantize_rowwise(x, E4M3, fold), quantize_colwise_t(x, E4M3)
    return row, col, scale_inv, *delayed, *rowwise, *colwise, transpose(row)


def quantizes_blocks(x: Tensor) -> tuple[Tensor | None, ...]:
    row = quantize_blockwise(x, E4M3, ROWS, "row")
    transposed = transpose_blockwise(row.x_fp8, row.scale_inv)
    return *row[:2], *transposed, *quantize_blockwise(x, E4M3, SQUARES, "both"), block_amax(x, SQUARES)


def produces(gate: Tensor, up: Tensor, weight: Tensor, slots: tuple[Any, Any]) -> tuple[Tensor | None, ...]:
    results: list[Tensor | None] = []
    for scaling in (slots[0], "rowwise", "tensorwise"):
        output, rstd = rmsnorm(gate, weight, 1e-5, E4M3, scaling)
        results += [*output[:2], *swiglu(gate, up, E4M3, scaling)[0][:2]]
        if scaling != "rowwise":
            grads = swiglu_backward_to_fp8(up, gate, up, E5M2, slots if scaling is slots[0] else (scaling, scaling))
            results += [*grads[0][:2], *grads[1][:2]]
    kept = quantize_groupwise(gate), quantize_groupwise(up)
    *grads, amax = swiglu_backward_kept(up, *kept, E5M2, ("tensorwise",) * 2)
    results += [*grads[0][:2], *grads[1][:2], *swiglu_columns(*kept, E4M3, "tensorwise", amax=amax)]
    return *results, *rmsnorm_backward(up, gate, weight, rstd), *swiglu_backward(up, gate, up)


def multiplies_groups(x: Tensor, weight: Tensor, ends: Tensor, one: Tensor) -> tuple[Tensor, ...]:
    scales = one, one, torch.bfloat16
    found = rows_by_matrices(x, weight, ends, *scales)
    return found, columns_by_columns(columns(x, ends), columns(x, ends), ends, *scales), transpose(weight)


def sums(rows: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    total = weighted_sum(rows, place, weights, torch.bfloat16)
    return total, *weighted_sum_backward(total, rows, place, weights)


def arguments_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    x = many_scales("per_tile", 256, 4096).bfloat16().cuda()
    if function is quantizes:
        return x, torch.rand(4096, device="cuda"), torch.zeros((), device="cuda")
    if function is produces:
        gate, up = make_gate(256, 4096).cuda(), make_rows(256, 4096, 1).cuda()
        return gate, up, up[0].clone(), tuple(make_scaling("given", "cuda") for _ in range(2))
    if function is multiplies_groups:
        x_fp8, weight = normal((128, 64), E4M3, 0), normal((3, 64, 64), E4M3, 1)
        return x_fp8, weight, ends_of([100, 0, 28]), torch.ones((), device="cuda")
    if function is sums:
        return x, torch.randperm(256, device="cuda"), torch.rand(64, 4, device="cuda")
    return (x,)


FUNCTIONS = [
    quantizes,
    quantizes_blocks,
    produces,
    pytest.param(multiplies_groups, marks=needs_grouped),
    sums,
]
by_function = pytest.mark.parametrize("function", FUNCTIONS)


def same(expected: tuple[Tensor | None, ...], found: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b)


@by_function
def test_a_captured_graph_replays_as_eager_calls(function: Callable[..., Any]) -> None:
    arguments = arguments_of(function)
    expected = function(*arguments)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*arguments)
    for _ in range(2):
        graph.replay()
    same(expected, captured)
    if arguments[0].dtype == torch.bfloat16:
        arguments[0].mul_(0.5)
        graph.replay()
        same(function(*arguments), captured)


@by_function
def test_no_call_waits_for_the_device(function: Callable[..., Any]) -> None:
    arguments = arguments_of(function)
    function(*arguments)
    with host_waits() as waits:
        function(*arguments)
    assert waits == []


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "tensorwise": lambda x: quantize_and_transpose_tensorwise(x, E4M3, "both"),
    "rowwise": lambda x: quantize_rowwise(x, E4M3),
    "colwise": lambda x: quantize_colwise_t(x, E4M3),
    "blockwise": lambda x: quantize_blockwise(x, E4M3, ROWS, "both"),
    "rmsnorm": lambda x: rmsnorm(x, x[0].clone(), 1e-5, E4M3, "tensorwise"),
    "swiglu": lambda x: swiglu(x, x, E4M3, "tensorwise"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_allocates_its_results_and_next_to_nothing_else(name: str) -> None:
    x = make_gate(2048, 4096).cuda()
    CALLS[name](x)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = CALLS[name](x)
    peak, kept = (number - before for number in (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
    assert results is not None and kept >= x.numel() and peak - kept < 1 << 18


def test_a_tensor_of_more_than_two_to_the_31_elements_is_cast_to_its_end() -> None:
    x = torch.zeros((1 << 17) + 16, 1 << 14, dtype=torch.bfloat16, device="cuda")
    x[-1, -1], x[-1, 0] = -3.0, 1.0
    row, col, scale_inv = quantize_and_transpose_tensorwise(x, E4M3, "both")
    assert row is not None and col is not None
    torch.testing.assert_close(scale_inv.item(), 3.0 / 448.0, rtol=1e-6, atol=0)
    assert row[-1, 0].float() > 0 and col[0, -1].float() > 0
    for x_fp8 in (row, col, transpose(row), quantize_rowwise(x, E4M3)[0], quantize_colwise_t(x, E4M3)[0]):
        assert x_fp8[-1, -1].float() == -448.0
    measured = torch.zeros((), device="cuda")
    record_amax(x, measured)
    assert measured == 3.0


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_weighted_sums_that_are_rounded_are_the_reference(weight_dtype: torch.dtype) -> None:
    """Bitwise, but for the order of sums over features."""
    rows, grad = (torch.randn(size, 2048, device="cuda").bfloat16() for size in (8000, 1000))
    place = torch.randperm(8000, device="cuda")
    arguments = rows, place, torch.rand(1000, 8, device="cuda").to(weight_dtype)
    expected = weighted_sum_reference(*arguments, torch.bfloat16)
    assert_bitwise(expected, weighted_sum(*arguments, torch.bfloat16))
    expected_rows, expected_weights = weighted_sum_backward_reference(grad, *arguments)
    found_rows, found_weights = weighted_sum_backward(grad, *arguments)
    assert_bitwise(expected_rows, found_rows)
    least = 50 if weight_dtype == torch.bfloat16 else 100
    assert float(sqnr_db(expected_weights.float(), found_weights.float())) > least


def test_gradients_that_move_in_every_step_are_found_while_earlier_copies_are_pending() -> None:
    """The host runs ahead of the device by eight steps; each copy of addresses comes from a buffer of its own."""
    shard = make_shard(BY_NAME["e4m11"], 128 * 64, 0)
    mine, theirs = clone_shard(shard), clone_shard(shard, "cuda")
    reference_step, kernel = prepare([mine]), prepare([theirs])
    grads = [make_grad(shard, torch.bfloat16, seed=step) for step in range(8)]
    on_cuda, inputs, expected = [x.cuda() for x in grads], make_inputs(device="cuda"), make_inputs()
    inputs.next_scale_inv, expected.next_scale_inv = inputs.scale_inv, expected.scale_inv
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for grad in on_cuda:
        kernel([grad], inputs)
    for grad in grads:
        reference_step([grad], expected)
    assert differences(mine, theirs) == []
    assert_bitwise(expected.amax, inputs.amax.cpu())


def test_a_captured_step_replays_as_eager_and_one_with_gradients_at_new_addresses_is_refused() -> None:
    shard = make_shard(BY_NAME["e4m11"], 1280, 0)
    grad = make_grad(shard, torch.bfloat16).cuda()
    eager, captured = clone_shard(shard, "cuda"), clone_shard(shard, "cuda")
    of_eager, kernel, inputs = prepare([eager]), prepare([captured]), make_inputs(device="cuda")
    inputs.next_scale_inv = inputs.scale_inv
    for _ in range(3):
        of_eager([grad], inputs)
    kernel([grad], inputs)  # makes the copy of addresses
    graph, refused = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel([grad], inputs)
    for _ in range(2):
        graph.replay()
    assert differences(eager, captured) == []
    other = grad.clone()
    with pytest.raises(RuntimeError, match="addresses"), torch.cuda.graph(refused):
        kernel([other], inputs)
    torch.cuda.synchronize()


def released(max_norm: float, is_captured: bool) -> tuple[AdamShard, list[Tensor]]:
    """A weight and its scales after nine steps of gradient release; the update of the second one is captured."""
    shard, device = make_shard(BY_NAME["e4m11"], 4136, 0), torch.device("cuda", torch.cuda.current_device())
    on_device, scales = clone_shard(shard, device), PredictedScales(1, device)
    scales.set(torch.ones(1, device=device))
    flats = [FlatBuffer(0, shard.numel, [(ShardRange(0, shard.numel), on_device)])]
    core = AdamCore(flats, [0], scales, device, True, 0)
    updater = ReleaseUpdater(core, 1, {shard.name: 0}, None, max_norm)
    groups = [{"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]
    grads = {shard.name: torch.empty(shard.numel, dtype=torch.bfloat16, device=device)}
    graph = None
    for step in range(9):
        grads[shard.name].copy_(make_grad(shard, torch.bfloat16, seed=step))
        if is_captured and step == 1:  # the first one was made with the same gradient tensor
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                updater.update([shard.name], grads, groups, 1.0)
        if graph is None:
            updater.update([shard.name], grads, groups, 1.0)
        else:
            graph.replay()
        updater.finish(None)
    scales.wait()
    return on_device, [core.step_count, scales.scale_inv, scales.amax, updater.last_norm]


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_a_captured_update_of_a_released_bucket_replays_as_eager(max_norm: float) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (eager, expected), (replayed, found) = (released(max_norm, is_captured) for is_captured in (False, True))
    finally:
        dist.destroy_process_group()
    assert expected[0].tolist() == [9] and differences(eager, replayed) == []
    same(tuple(expected), tuple(found))


def test_a_step_never_waits_for_the_device_and_allocates_less_than_a_mebibyte() -> None:
    shards = [make_shard(BY_NAME[name], 1 << 20, 0, seed=seed) for seed, name in enumerate(BY_NAME)]
    shards = [clone_shard(shard, "cuda") for shard in shards]
    grads = [[make_grad(shard, torch.bfloat16, seed=step).cuda() for shard in shards] for step in range(3)]
    kernel, inputs = prepare(shards), make_inputs(device="cuda")
    kernel(grads[0], inputs)  # compiles
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with host_waits() as waits:
        for step in range(6):
            kernel(grads[step % 3], inputs)
    assert waits == []
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@needs_hopper
def test_torch_refuses_blocks_in_e5m2() -> None:
    """When it does no longer, `grad_dtype` may be "e5m2" (fp8_ds/config/__init__.py)."""
    a, b = (quantize_blockwise(torch.randn(256, 256).cuda(), fmt, ROWS, "row") for fmt in (E5M2, E4M3))
    with pytest.raises(ValueError, match="BlockWise"):
        scaled_mm_blockwise(a.x_fp8, b.x_fp8, a.scale_inv, b.scale_inv, torch.bfloat16)


def normal(shape: tuple[int, ...], fmt: Any, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(fmt.dtype)


def on_cuda(*numbers: float) -> list[Tensor]:
    return [torch.full((), number, device="cuda") for number in numbers]


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def assert_as_exact(exact: Tensor, own: Tensor, found: Tensor, fast: bool) -> None:
    db = [float(sqnr_db(exact, one.float())) for one in (own, found)]
    assert db[1] > db[0] - (10 if fast else 3), db


@needs_grouped
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_grouped_products_are_as_exact_as_the_product_of_each_group(dtype: torch.dtype, fast: bool) -> None:
    """At most twice the power of its error; of fast sums, which cuBLAS may cut where rows are few, ten times."""
    sizes = [37, 0, 640, 1, 0, 130, 128, 127, 129]
    ends, scales = ends_of(sizes), on_cuda(0.3, 2.0**-9)
    a, b = normal((sum(sizes), 2048), E5M2, 0), normal((len(sizes), 512, 2048), E4M3, 1)
    x = normal((sum(sizes), 512), E4M3, 2)
    bounds = [(int(end) - size, int(end), group) for group, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    own = [
        scaled_mm(a[start:end], b[group], *scales, dtype, use_fast_accum=fast)
        for start, end, group in bounds
        if start < end
    ]
    found = rows_by_matrices(a, b, ends, *scales, dtype, fast)
    assert_as_exact(reference.rows_by_matrices(a, b, ends, *scales, torch.float32), torch.cat(own), found, fast)
    transposed = (columns(a, ends), columns(x, ends), ends, *scales)
    own = [
        scaled_mm(a[start:end].t(), x[start:end].t(), *scales, dtype, use_fast_accum=fast) for start, end, _ in bounds
    ]
    found = columns_by_columns(*transposed, dtype, fast)
    assert_as_exact(reference.columns_by_columns(*transposed, torch.float32), torch.stack(own), found, fast)


@needs_grouped
def test_grouped_products_run_off_the_current_stream_and_in_a_thread_of_their_own() -> None:
    """Autograd's backward has a thread, in which Triton has no allocator for descriptors made on the device."""
    arguments, found = arguments_of(multiplies_groups), []
    expected = multiplies_groups(*arguments)

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(multiplies_groups(*arguments))

    torch.cuda.synchronize()
    thread = Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    for one, other in zip(expected, found[0], strict=True):
        assert_bitwise(one, other)
