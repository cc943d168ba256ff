"""The Adam kernel and the decoding of masters against their references on a CPU, bit for bit."""

from functools import partial

import pytest
import torch
from support.adam_shards import (
    clone_shard,
    differences,
    make_fallen_scale,
    make_grad,
    make_inputs,
    make_shard,
)
from support.kernels import DEVICE, INTERPRETED, KERNEL, to_device, with_cuda_sizes
from support.masters import every_master

from fp8_ds.numerics.masters import BY_NAME, decode
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.reference import adamw_step
from fp8_ds.ops.adamw.triton import DECODE_BLOCK, LAUNCHES, TritonStep, decode_master
from fp8_ds.testing import assert_bitwise

pytestmark = KERNEL

FORMATS = list(BY_NAME)
E4M11 = BY_NAME["e4m11"]
STEPS = ((lambda shards: partial(adamw_step, shards), "cpu"), (TritonStep, DEVICE))
"""By the reference, by the kernel; each with its device."""
SIZES = [1, 127, 128, 129, 2048 + 5]
HEADS = [0, 1, 127]
LARGEST_BLOCK = max(launch.rows * launch.num_tiles for launch in LAUNCHES.values()) * 128
SEVERAL_BLOCKS = 2 * LARGEST_BLOCK + 17 * 128


def both(shards, grads, change=lambda inputs: None, **keys):
    """Reference and kernel on clones of the same shards: (shards, inputs) of each."""
    results = []
    for make_step, device in STEPS:
        mine, inputs = [clone_shard(shard, device) for shard in shards], make_inputs(device=device, **keys)
        change(inputs)
        make_step(mine)([None if grad is None else grad.to(device) for grad in grads], inputs)
        results.append((mine, inputs))
    return results


def assert_equal(expected, got):
    assert [line for a, b in zip(expected[0], got[0], strict=True) for line in differences(a, b)] == []
    assert_bitwise(expected[1].amax, got[1].amax.cpu())


def moved(x, offset):
    """A copy on the device that begins `offset` elements behind an aligned address."""
    return torch.empty(x.numel() + offset, dtype=x.dtype, device=DEVICE)[offset:].copy_(x)


@pytest.mark.parametrize(
    ("name", "dtype", "decoupled"),
    [
        ("fp32", torch.bfloat16, True),
        pytest.param("bf16_8", torch.float32, False, marks=pytest.mark.slow),
        ("e4m19", torch.float32, True),
        pytest.param("e4m11", torch.bfloat16, False, marks=pytest.mark.slow),
        *with_cuda_sizes([], [("fp32", torch.float32, False), ("bf16_8", torch.bfloat16, True)]),
    ],
)
def test_kernel_equals_reference_bitwise_for_every_head_and_size(name, dtype, decoupled):
    shards = [
        make_shard(BY_NAME[name], numel, 384 + head, seed=index, scale_index=index % 4)
        for index, (numel, head) in enumerate((numel, head) for numel in SIZES for head in HEADS)
    ]
    grads = [make_grad(shard, dtype, seed=shard.param_id) for shard in shards]
    expected, got = both(shards, grads, decoupled=decoupled)
    assert all(differences(before, after) for before, after in zip(shards, got[0], strict=True))
    assert_equal(expected, got)


@pytest.mark.parametrize("numel", with_cuda_sizes([SEVERAL_BLOCKS], [128, 128 * 1111, 1 << 26]))
@pytest.mark.parametrize("name", FORMATS)
def test_aligned_shards_of_several_blocks_equal_the_reference_bitwise(name, numel):
    """Whole tiles, the unmasked variant of the kernel, whose last block is not full; a group is left beside them."""
    shard = make_shard(BY_NAME[name], numel, 256)
    assert_equal(*both([shard], [make_grad(shard, torch.bfloat16)]))


def test_all_formats_sizes_and_gradient_dtypes_in_one_step():
    shards = [make_shard(BY_NAME[name], 300 + seed, seed, seed=seed) for seed, name in enumerate(FORMATS * 2)]
    shards.append(make_shard(E4M11, 0, 128, seed=20))
    dtypes = [torch.bfloat16] * 4 + [torch.float32] * 5
    grads = [make_grad(shard, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
    assert_equal(*both(shards, grads))


def test_steps_with_changing_scales_and_gradients_equal_the_reference_bitwise():
    """Other scales, tensors, dtypes and shards that take part: addresses of the last step are not used again."""
    shards = [
        make_shard(BY_NAME[name], numel, start, seed=start, scale_index=start % 4)
        for name, numel, start in (("e4m19", 2048, 0), ("e4m11", 700, 5), ("bf16_8", 300, 2))
    ]
    mine, theirs = ([clone_shard(shard, device) for shard in shards] for device in ("cpu", DEVICE))
    reference, kernel = partial(adamw_step, mine), TritonStep(theirs)
    scale_inv = make_inputs().scale_inv
    for step, present in enumerate(((0, 1, 2), (1,), (0, 2), (0, 1)), start=1):
        dtype = torch.float32 if step == 3 else torch.bfloat16
        grads = [make_grad(shard, dtype, step) if index in present else None for index, shard in enumerate(shards)]
        expected, got = make_inputs(step), make_inputs(step, device=DEVICE)
        for inputs in (expected, got):
            inputs.scale_inv = scale_inv.to(inputs.amax.device)
            inputs.next_scale_inv = inputs.scale_inv * 2.0 ** (step - 2)
        reference(grads, expected)
        kernel(to_device(*grads), got)
        assert_equal((mine, expected), (theirs, got))
        scale_inv = expected.next_scale_inv


def test_hyperparameters_and_steps_come_from_the_row_of_the_shard():
    def change(inputs):
        second = make_inputs(9, device=inputs.amax.device)
        inputs.hyper = torch.cat([inputs.hyper, second.hyper * 0.9])
        inputs.step = torch.cat([inputs.step, second.step])

    shards = [make_shard(E4M11, 256, 0), make_shard(E4M11, 256, 0, scale_index=1)]
    shards[1].group = 1
    expected, got = both(shards, [make_grad(shard, torch.bfloat16) for shard in shards], change)
    assert_equal(expected, got)
    assert differences(*got[0])


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_of_zeros_stays_zeros_with_scale_zero(name):
    shard = make_shard(BY_NAME[name], 512, 0)
    got = both([shard], [make_grad(shard, torch.bfloat16)])[1][0][0]
    assert got.m_scale_inv[2] == 0 and got.v_scale_inv[2] == 0 and (got.m_scale_inv[[0, 1, 3]] > 0).all()
    assert not got.m[256:384].any() and not got.v[256:384].any()


@pytest.mark.parametrize(
    "exponent",
    with_cuda_sizes([-149, -133, -110, -101, -75, -60, -50, -45, 20, 40, 60], [*range(-147, -40, 4), -100, -51, 0]),
)
def test_extreme_gradients_equal_the_reference_bitwise(exponent):
    """Squares below float32's normal numbers, scales at the edge to zero, roots far above 1, in groups of their own."""
    shard = make_shard(E4M11, 1024, 0)
    for tensor in (shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv):
        tensor[: tensor.numel() // 2] = 0
    grad = make_grad(shard, torch.float32)
    grad.clamp_(-1, 1)[::3] = 2.0**exponent * 1.1
    grad[:256] = 2.0**exponent * torch.linspace(-1, 1, 256)
    assert_equal(*both([shard], [grad]))


@pytest.mark.parametrize("mantissas", range(4))
def test_every_group_scale_equals_the_reference_bitwise(mantissas):
    """The quotient by 448 and by 496 and the inverse, for a quarter of float32's mantissas: one group has each."""
    bits = torch.arange(mantissas << 21, (mantissas + 1) << 21, dtype=torch.int32)
    bits = bits[:: 1 << 15 if INTERPRETED else 64] + (mantissas * 17)
    shard = make_shard(E4M11, 128 * len(bits), 0)
    for tensor in (shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv):
        tensor.zero_()
    grad = make_grad(shard, torch.float32).clamp(-1e-3, 1e-3)
    grad[::128] = (bits + (120 << 23)).view(torch.float32)
    assert_equal(*both([shard], [grad]))


def by_both(make):
    """Steps of the reference and of the kernel on what `make(device=...)` gives: a shard, its gradient, inputs."""
    results = []
    for make_step, device in STEPS:
        shard, grad, inputs = make(device=device)
        make_step([shard])([grad], inputs)
        results.append(([shard], inputs))
    assert_equal(*results)
    return results[0][0][0]


@pytest.mark.parametrize("factor", [2.0**-6, 2.0**-7, 2.0**-9, 2.0**-21, 2.0**9, 2.0**30])
def test_scales_may_change_by_any_power_of_two(factor):
    by_both(partial(make_fallen_scale, factor))


def test_skip_leaves_every_byte():
    shard = make_shard(E4M11, 700, 3)
    for mine, inputs in both([shard], [torch.full((700,), float("nan"))], lambda inputs: inputs.skip.fill_(2)):
        assert differences(shard, mine[0]) == []
        assert not inputs.amax.any()


def test_a_shard_without_gradient_is_left_alone():
    shards = [make_shard(E4M11, numel, 0, seed=i, scale_index=i) for i, numel in enumerate((300, 200, 128))]
    grads = [None if index == 1 else make_grad(shard, torch.bfloat16) for index, shard in enumerate(shards)]
    expected, got = both(shards, grads)
    assert_equal(expected, got)
    assert differences(shards[1], got[0][1]) == [] and got[1].amax[1] == 0
    assert differences(shards[0], got[0][0]) and differences(shards[2], got[0][2])


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_any_alignment_of_the_weight_and_the_gradient(offset):
    shard = make_shard(E4M11, 384, 0)
    grad = make_grad(shard, torch.bfloat16)
    expected = both([shard], [grad])[0]
    shard = clone_shard(shard, DEVICE)
    for name in ("hi", "lo", "m", "v"):
        setattr(shard, name, moved(getattr(shard, name), offset))
    inputs = make_inputs(device=DEVICE)
    TritonStep([shard])([moved(grad, offset)], inputs)
    assert_equal(expected, ([shard], inputs))


def test_padding_of_the_states_is_written_as_zeros_and_that_of_lo_is_left():
    shard = make_shard(E4M11, 100, 128 + 9)
    for tensor in (shard.m, shard.v):
        tensor[:9], tensor[109:] = 0x55, 0x55
    shard.lo[:9], shard.lo[109:] = 77, 77
    expected, got = both([shard], [make_grad(shard, torch.bfloat16)])
    assert_equal(expected, got)
    after: AdamShard = got[0][0]
    assert not after.m[:9].any() and not after.v[109:].any()
    assert (after.lo[:9] == 77).all() and (after.lo[109:] == 77).all()


@pytest.mark.parametrize(
    "change", [lambda x: x.half(), lambda x: x[1:], lambda x: x[:, None], lambda x: x.repeat(2)[::2]]
)
def test_gradients_of_another_kind_are_refused(change):
    shard = clone_shard(make_shard(E4M11, 300, 0), DEVICE)
    before = clone_shard(shard)
    with pytest.raises(ValueError, match="weight0"):
        TritonStep([shard])([change(torch.zeros(300, device=DEVICE))], make_inputs(device=DEVICE))
    assert differences(before, shard) == []


SPLIT = [fmt for fmt in BY_NAME.values() if fmt.is_split]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def test_decoded_masters_equal_the_reference_bitwise(fmt, dtype):
    hi, lo = every_master(fmt)
    scales = [torch.tensor(2.0**exponent) for exponent in (-149, -140, -20, 0, 119)] if fmt.is_fp8 else [None]
    for scale_inv, offset in zip(scales, (0, 1, 16, 0, 0), strict=False):
        out = torch.empty(hi.shape, dtype=dtype, device=DEVICE)
        decode_master(moved(hi, offset), moved(lo, offset), fmt, *to_device(scale_inv), out)
        assert_bitwise(out.cpu(), decode(hi, lo, fmt, scale_inv).to(dtype))


@pytest.mark.parametrize("numel", [1, DECODE_BLOCK - 1, DECODE_BLOCK, DECODE_BLOCK + 1])
def test_nothing_behind_the_end_is_written(numel):
    hi, lo = (x[:numel] for x in every_master(E4M11))
    memory = torch.full((numel + 3,), 7.0, device=DEVICE)
    decode_master(*to_device(hi, lo), E4M11, *to_device(torch.tensor(0.5)), memory[1 : numel + 1])
    assert_bitwise(memory[1 : numel + 1].cpu(), decode(hi, lo, E4M11, torch.tensor(0.5)))
    assert memory[0] == 7 and memory[numel + 1 :].tolist() == [7, 7]
