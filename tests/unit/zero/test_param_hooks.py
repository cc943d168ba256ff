"""The closures of ZeRO-3 parameters, on a stub host whose ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from support.threads import on_threads
from support.zero3_host import (
    NUM_FP8,
    fp8_shards,
    hooked_shards,
    refresh,
    shard_masters,
    sharded_parameter,
    whole_bytes,
)

from fp8_ds.comm import collectives
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.quantize import quantize
from fp8_ds.zero.param_hooks import Bf16ParamHooks, ZeroParamHooks, hooks_of, share_readers
from fp8_ds.zero.sharded import Bf16Shard


def fetched(chosen: list[int]) -> None:
    params, shards = hooked_shards()
    asked = [params[i] for i in chosen][:: 1 - 2 * (dist.get_rank() == 1)]  # in another order, as sets give them
    registry: Any = asked[0].all_gather_coalesced(asked)
    assert {params[i].ds_status for i in chosen if i < NUM_FP8} <= {ZeroParamStatus.INFLIGHT}
    registry.wait()
    for i in chosen:
        assert params[i].ds_status == ZeroParamStatus.AVAILABLE
        if i < NUM_FP8:
            assert torch.equal(params[i]._fp8.data.view(torch.uint8), whole_bytes(i)), i
        else:
            assert torch.equal(params[i].data, shard_masters()[i].bfloat16())
    num_ranks = dist.get_world_size()
    padded = [num_ranks * params[i].ds_tensor.ds_numel for i in chosen]
    in_fp8 = sum(n for i, n in zip(chosen, padded, strict=True) if i < NUM_FP8)
    in_bf16 = 2 * (sum(padded) - in_fp8)
    assert (shards.counter.fp8, shards.counter.hp) == ((in_fp8, in_bf16) if num_ranks > 1 else (0, 0))
    with pytest.raises(RuntimeError, match="AVAILABLE"):
        shards.gather(shards.weights[chosen[0] : chosen[0] + 1])


@pytest.mark.parametrize("min_bytes", [0, 2**20], ids=["sent each", "one buffer"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_fetch_brings_a_byte_a_weight_and_the_bytes_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, min_bytes: int
) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", min_bytes)
    for chosen in ([0], [0, 1, 2], [2, 0], [1, 3]):  # alone; one behind the other; with a gap and in any order; mixed
        on_threads(num_ranks, fetched, chosen)


def read_and_written() -> None:
    params, shards = hooked_shards()
    weight, p = shards.weights[1], params[1]
    before = weight.shard.view(torch.uint8).clone()
    p.all_gather()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(p.data, shard_masters()[1].bfloat16())
    p.partition([p], has_been_updated=True)  # nobody has changed it
    assert torch.equal(weight.shard.view(torch.uint8), before) and weight.bf16_shard is Bf16Shard.ABSENT
    assert bool(p.ds_tensor.isnan().all())  # what reads past the closures
    p.all_gather()
    with torch._C.DisableTorchFunctionSubclass():
        p.data[0, 0] = 4 * shard_masters()[1].abs().max()
    p.partition([p], has_been_updated=True)
    value = shard_masters()[1].clone()
    value[0, 0] = (4 * value.abs().max()).bfloat16()
    scale, scale_inv = scale_from_amax(value.abs().max(), E4M3.max)
    own = quantize(value, scale, E4M3).view(torch.uint8).flatten()[weight.elements.start : weight.elements.stop]
    assert torch.equal(weight.own_bytes.view(torch.uint8), own) and float(weight.payload.scale_inv) == scale_inv
    assert (weight.bf16_shard is Bf16Shard.WRITTEN) == (dist.get_rank() == 0)
    refresh(shards)  # the master is what it was
    assert weight.bf16_shard is Bf16Shard.ABSENT
    assert torch.equal(weight.shard.view(torch.uint8), before)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_reader_gets_bf16_of_the_masters_and_what_it_writes_holds_until_the_next_step(num_ranks: int) -> None:
    on_threads(num_ranks, read_and_written)


def released() -> None:
    params, shards = hooked_shards()
    p, weight = params[0], shards.weights[0]
    for release in (p.partition, lambda: p.partition([p])):  # ours alone; DeepSpeed's own
        shards.gather([weight]).wait()
        release()
        with torch._C.DisableTorchFunctionSubclass():
            assert (p.ds_status, p.data.numel(), p.dtype) == (ZeroParamStatus.NOT_AVAILABLE, 0, torch.bfloat16)
        assert weight.payload.data is None
    shards.gather([weight]).wait()
    p.ds_active_sub_modules.add(17)
    with pytest.raises(RuntimeError, match="still active"):
        p.partition()


def test_a_weight_is_left_as_deepspeed_leaves_one_and_not_while_it_is_used() -> None:
    on_threads(2, released)


def persistent() -> None:
    params, shards = hooked_shards()
    shards.persistent = params
    params[0].all_gather(shards.persistent)
    assert all(p.ds_status == ZeroParamStatus.AVAILABLE for p in params)
    assert torch.equal(params[1]._fp8.data.view(torch.uint8), whole_bytes(1))
    assert torch.equal(params[3].data, shard_masters()[3].bfloat16())


def test_what_persists_is_gathered_in_its_own_dtype() -> None:
    on_threads(2, persistent)


def of_two_engines() -> None:
    """Weights of an engine in FP8 and of a reference model, in one list, as `GatheredParameters` has them."""
    params, _ = hooked_shards()
    others = [sharded_parameter(10 + i, value) for i, value in enumerate(shard_masters())]
    share_readers(torch.nn.ParameterList(others))
    assert all(isinstance(hooks_of(p), Bf16ParamHooks) for p in others)
    for first in (params[0], others[0]):
        mixed = [params[0], others[0], params[3], others[1]]
        first.all_gather(mixed)
        with torch._C.DisableTorchFunctionSubclass():
            for p, i in zip(mixed, (0, 0, 3, 1), strict=True):
                assert torch.equal(p.data, shard_masters()[i].bfloat16())
        first.partition(mixed)
        assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in mixed)


def test_one_read_may_be_of_weights_of_several_engines() -> None:
    on_threads(2, of_two_engines)


def test_hooks_can_be_removed() -> None:
    def removed() -> bool:
        p = sharded_parameter(0, shard_masters()[0])
        before = p.all_gather, p.partition
        Bf16ParamHooks(p).remove()
        return bool((p.all_gather, p.partition) == before)

    assert on_threads(1, removed) == [True]


def test_an_engine_in_fp8_takes_over_a_parameter_that_shared_its_readers() -> None:
    """As a model that an engine without an optimizer had before."""

    def taken_over() -> bool:
        params = [sharded_parameter(i, value) for i, value in enumerate(shard_masters())]
        before = [(p.all_gather, p.partition) for p in params]
        share_readers(torch.nn.ParameterList(params))
        shards = fp8_shards(params, shard_masters(), NUM_FP8)
        for p in params:
            ZeroParamHooks(p, shards)
        params[0].all_gather([params[0], params[3]])
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(params[0].data, shard_masters()[0].bfloat16())
        for p in params:
            hooks_of(p).remove()
        return [(p.all_gather, p.partition) for p in params] == before

    assert on_threads(2, taken_over) == [True, True]
