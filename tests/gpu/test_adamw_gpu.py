"""The Adam kernel on CUDA against the reference on CPU copies, bit for bit; capture, memory, no waiting."""

import gc

import pytest
import torch
from support.adam_shards import (
    STATE,
    clone_shard,
    differences,
    make_fallen_scale,
    make_grad,
    make_inputs,
    make_representable,
    make_shard,
)

from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.ops.adamw import prepare
from fp8_ds.ops.adamw.reference import adamw_step
from fp8_ds.testing import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

FORMATS = list(BY_NAME)
SIZES = [1, 127, 128, 129, 2048 + 5]
HEADS = [0, 1, 127]
DTYPES = [torch.bfloat16, torch.float32]


def cuda(tensors):
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def reference_and_kernel(shards, grads, **keys):
    """Reference on CPU and kernel on CUDA, on clones of the same shards: (shards, inputs) of each."""
    expected, inputs = [clone_shard(shard) for shard in shards], make_inputs(**keys)
    adamw_step(expected, grads, inputs)
    got, cuda_inputs = [clone_shard(shard, "cuda") for shard in shards], make_inputs(device="cuda", **keys)
    prepare(got)(cuda(grads), cuda_inputs)
    return (expected, inputs), (got, cuda_inputs)


def assert_equal(expected, got):
    assert [line for a, b in zip(expected[0], got[0], strict=True) for line in differences(a, b)] == []
    assert_bitwise(expected[1].amax, got[1].amax.cpu())


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_equals_cpu_reference_bitwise_for_every_head_and_size(name, dtype, decoupled):
    shards = [
        make_shard(BY_NAME[name], numel, 384 + head, seed=index, scale_index=index % 4)
        for index, (numel, head) in enumerate((numel, head) for numel in SIZES for head in HEADS)
    ]
    grads = [make_grad(shard, dtype, seed=shard.param_id) for shard in shards]
    assert_equal(*reference_and_kernel(shards, grads, decoupled=decoupled))


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_aligned_shards_equal_cpu_reference_bitwise(name, dtype, decoupled):
    """From a group's start: whole tiles by vector loads, whose last block is not full, and groups beside them."""
    shards = [make_shard(BY_NAME[name], numel, 256, seed=numel) for numel in (128, 128 * 33, 128 * 1111)]
    grads = [make_grad(shard, dtype) for shard in shards]
    assert_equal(*reference_and_kernel(shards, grads, decoupled=decoupled))


@pytest.mark.parametrize("name", ["e4m19", "e4m11"])
def test_64_million_elements_equal_cpu_reference_bitwise(name):
    shards = [make_shard(BY_NAME[name], 1 << 26, 0)]
    assert_equal(*reference_and_kernel(shards, [make_grad(shards[0], torch.bfloat16)]))


@pytest.mark.parametrize("exponent", [*range(-149, -40, 4), -101, -100, -51, -50, -49, 0, 20, 40, 60])
@pytest.mark.parametrize("name", ["fp32", "e4m11"])
def test_extreme_gradients_equal_cpu_reference_bitwise(name, exponent):
    """Where roots and quotients leave the fast paths: squares below float32's normal numbers, tiny and huge roots."""
    shard = make_shard(BY_NAME[name], 4096, 0)
    for tensor in (shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv):
        tensor[: tensor.numel() // 2] = 0
    grad = make_grad(shard, torch.float32)
    grad.clamp_(-1, 1)[::3] = 2.0**exponent * 1.1
    grad[:1024] = 2.0**exponent * torch.linspace(-1, 1, 1024)
    assert_equal(*reference_and_kernel([shard], [grad]))


@pytest.mark.parametrize("mantissas", range(4))
def test_every_group_scale_equals_cpu_reference_bitwise(mantissas):
    """The quotient by 448 and by 496 and the inverse, for a quarter of float32's mantissas: one group has each."""
    bits = torch.arange(mantissas << 21, (mantissas + 1) << 21, dtype=torch.int32)[::64] + (mantissas * 17)
    shard = make_shard(BY_NAME["e4m11"], 128 * len(bits), 0)
    for tensor in (shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv):
        tensor.zero_()
    grad = make_grad(shard, torch.float32).clamp(-1e-3, 1e-3)
    grad[::128] = (bits + (120 << 23)).view(torch.float32)
    assert_equal(*reference_and_kernel([shard], [grad]))


def test_three_steps_with_changing_scales_equal_cpu_reference_bitwise():
    shards = [make_shard(BY_NAME[name], 5000, seed, seed=seed) for seed, name in enumerate(FORMATS)]
    mine, theirs = [clone_shard(shard) for shard in shards], [clone_shard(shard, "cuda") for shard in shards]
    reference, kernel = prepare(mine), prepare(theirs)
    scale_inv = make_inputs().scale_inv
    for step in range(1, 4):
        grads = [make_grad(shard, torch.bfloat16, seed=step) for shard in shards]
        expected, got = make_inputs(step), make_inputs(step, device="cuda")
        for inputs in (expected, got):
            inputs.scale_inv = scale_inv.to(inputs.amax.device)
            inputs.next_scale_inv = inputs.scale_inv * 2.0 ** (step - 2)
        reference(grads, expected)
        kernel(cuda(grads), got)
        assert_equal((mine, expected), (theirs, got))
        scale_inv = expected.next_scale_inv


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_any_alignment_equals_cpu_reference_bitwise(offset):
    shard = make_shard(BY_NAME["e4m11"], 128 * 40, 0)
    grad = make_grad(shard, torch.bfloat16)
    expected, _ = reference_and_kernel([shard], [grad])
    moved = clone_shard(shard, "cuda")
    for name in ("hi", "lo", "m", "v"):
        value = getattr(moved, name)
        setattr(moved, name, torch.empty(value.numel() + offset, dtype=value.dtype, device="cuda")[offset:])
        getattr(moved, name).copy_(value)
    inputs = make_inputs(device="cuda")
    prepare([moved])([torch.empty(len(grad) + offset, dtype=grad.dtype, device="cuda")[offset:].copy_(grad)], inputs)
    assert_equal(expected, ([moved], inputs))


def test_moments_that_their_formats_have_stay_as_in_the_reference():
    expected, grad, inputs = make_representable()
    got, got_grad, got_inputs = make_representable("cuda")
    adamw_step([expected], [grad], inputs)
    prepare([got])([got_grad], got_inputs)
    assert_equal(([expected], inputs), ([got], got_inputs))
    assert (expected.m_scale_inv[:2] == 1).all() and (expected.v_scale_inv[2:] == 1).all()
    assert expected.m[:127].tolist() == list(range(127)) and expected.m[129:255].tolist() == list(range(0x81, 0xFF))
    assert expected.v[256:383].tolist() == list(range(127)) and expected.v[384:511].tolist() == list(range(128, 255))


@pytest.mark.parametrize("factor", [2.0**-6, 2.0**-7, 2.0**-9, 2.0**-21, 2.0**9, 2.0**30])
def test_scales_may_change_by_any_power_of_two(factor):
    expected, grad, inputs = make_fallen_scale(factor)
    got, got_grad, got_inputs = make_fallen_scale(factor, "cuda")
    adamw_step([expected], [grad], inputs)
    prepare([got])([got_grad], got_inputs)
    assert_equal(([expected], inputs), ([got], got_inputs))


def test_skip_leaves_every_byte_and_none_leaves_a_shard():
    shards = [make_shard(BY_NAME["e4m11"], 700, 3, seed=i, scale_index=i) for i in range(3)]
    mine, inputs = [clone_shard(shard, "cuda") for shard in shards], make_inputs(device="cuda")
    inputs.skip.fill_(1)
    step = prepare(mine)
    step([torch.full((700,), float("nan"), device="cuda")] * 3, inputs)
    assert [line for a, b in zip(shards, mine, strict=True) for line in differences(a, b)] == []
    assert not inputs.amax.any()
    grads = [None, make_grad(shards[1], torch.bfloat16), None]
    expected = [clone_shard(shard) for shard in shards]
    cpu_inputs, inputs = make_inputs(), make_inputs(device="cuda")
    prepare(expected)(grads, cpu_inputs)
    step(cuda(grads), inputs)
    assert_equal((expected, cpu_inputs), (mine, inputs))
    assert differences(shards[0], mine[0]) == []


def test_gradients_that_move_in_every_step_are_found_while_earlier_copies_are_pending():
    """The host runs ahead of the device by eight steps; each copy of addresses comes from a buffer of its own."""
    shard = make_shard(BY_NAME["e4m11"], 128 * 64, 0)
    mine, theirs = clone_shard(shard), clone_shard(shard, "cuda")
    reference, kernel = prepare([mine]), prepare([theirs])
    grads = [make_grad(shard, torch.bfloat16, seed=step) for step in range(8)]
    on_cuda, inputs, expected = cuda(grads), make_inputs(device="cuda"), make_inputs()
    inputs.next_scale_inv, expected.next_scale_inv = inputs.scale_inv, expected.scale_inv
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for grad in on_cuda:
        kernel([grad], inputs)
    for grad in grads:
        reference([grad], expected)
    assert_equal(([mine], expected), ([theirs], inputs))


def test_a_captured_step_replays_as_eager_steps():
    shards = [make_shard(BY_NAME[name], 128 * 300, 0, seed=seed) for seed, name in enumerate(FORMATS)]
    eager, captured = [clone_shard(shard, "cuda") for shard in shards], [clone_shard(shard, "cuda") for shard in shards]
    grads = cuda(make_grad(shard, torch.bfloat16) for shard in shards)
    kernel, inputs, eager_inputs = prepare(captured), make_inputs(device="cuda"), make_inputs(device="cuda")
    for some in (inputs, eager_inputs):
        some.next_scale_inv = some.scale_inv
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel(grads, inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(grads, inputs)
        inputs.step.add_(1)
    kernel([torch.zeros_like(grad) for grad in grads[:-1]] + [None], make_inputs(device="cuda"))  # other addresses
    for mine, theirs in zip(captured, shards, strict=True):
        for name in STATE:
            if getattr(mine, name) is not None:
                getattr(mine, name).copy_(getattr(theirs, name))
    inputs.amax.zero_()
    reference = prepare(eager)
    for _ in range(3):
        graph.replay()
        reference(grads, eager_inputs)
        eager_inputs.step.add_(1)
    inputs.amax, eager_inputs.amax = inputs.amax.cpu(), eager_inputs.amax.cpu()
    assert_equal((eager, eager_inputs), (captured, inputs))
    assert inputs.step.item() == 6


def test_capture_with_gradients_at_new_addresses_is_refused():
    shard = make_shard(BY_NAME["e4m11"], 1280, 0)
    grad = make_grad(shard, torch.bfloat16).cuda()
    kernel, inputs = prepare([clone_shard(shard, "cuda")]), make_inputs(device="cuda")
    kernel([grad], inputs)
    other = grad.clone()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="at other addresses"), torch.cuda.graph(graph):
        kernel([other], inputs)
    torch.cuda.synchronize()


def test_a_step_never_waits_for_the_device_and_allocates_less_than_a_mebibyte():
    shards = [make_shard(BY_NAME[name], 1 << 20, 0, seed=seed) for seed, name in enumerate(FORMATS)]
    shards = [clone_shard(shard, "cuda") for shard in shards]
    grads = [[make_grad(shard, torch.bfloat16, seed=step).cuda() for shard in shards] for step in range(3)]
    kernel, inputs = prepare(shards), make_inputs(device="cuda")
    kernel(grads[0], inputs)  # compiles
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, mode = torch.cuda.memory_allocated(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6):
            kernel(grads[step % 3], inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
