"""FP8 shards of ZeRO-3 and the closures of its parameters, on a stub host whose ranks are threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from support.inputs import many_scales
from support.threads import on_threads
from support.zero3_host import fp8_shards, refresh, sharded_parameter
from torch import Tensor

from fp8_ds.comm import collectives
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.quantize import quantize
from fp8_ds.zero import sharded
from fp8_ds.zero.param_hooks import Bf16ParamHooks, ZeroParamHooks, hooks_of, share_readers
from fp8_ds.zero.sharded import Bf16Shard, Gathered

SHAPES = [(3, 5), (4, 8), (1, 7), (6, 2)]
NUM_FP8 = 3
"""The last one stays in bf16."""


def masters() -> list[Tensor]:
    return [many_scales("per_row", *shape, seed=i) for i, shape in enumerate(SHAPES)]


def built() -> tuple[list[Any], Any]:
    params = [sharded_parameter(i, value.bfloat16().float()) for i, value in enumerate(masters())]
    shards = fp8_shards(params, masters(), NUM_FP8)
    for p in params:
        ZeroParamHooks(p, shards)
    return params, shards


def expected(index: int) -> Tensor:
    """Bytes of the whole master, by definition."""
    master = masters()[index]
    return quantize(master, scale_from_amax(master.abs().max(), E4M3.max)[0], E4M3).view(torch.uint8)


def fetched(chosen: list[int]) -> None:
    params, shards = built()
    asked = [params[i] for i in chosen][:: 1 - 2 * (dist.get_rank() == 1)]  # in another order, as sets give them
    registry: Any = asked[0].all_gather_coalesced(asked)
    assert {params[i].ds_status for i in chosen if i < NUM_FP8} <= {ZeroParamStatus.INFLIGHT}
    registry.wait()
    for i in chosen:
        assert params[i].ds_status == ZeroParamStatus.AVAILABLE
        if i < NUM_FP8:
            assert torch.equal(params[i]._fp8.data.view(torch.uint8), expected(i)), i
        else:
            assert torch.equal(params[i].data, masters()[i].bfloat16())
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


def freed() -> None:
    _, shards = built()
    handle = shards.gather(shards.weights)
    received = [weakref.ref(buffer) for buffer in handle.buffers]
    handle.wait()
    for weight in shards.weights:
        weight.leave()
    dist.barrier()  # until then the threads' collective may hold what it has filled
    gc.collect()
    assert received and all(buffer() is None for buffer in received)


@pytest.mark.parametrize("min_bytes", [0, 2**20], ids=["sent each", "one buffer"])
def test_a_released_weights_bytes_are_free_whoever_keeps_the_handle(
    monkeypatch: pytest.MonkeyPatch, min_bytes: int
) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", min_bytes)
    on_threads(2, freed)


def test_nothing_is_sent_from_memory_that_a_handle_frees_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards stay; copies of some that lie apart are in the buffer, which streams are recorded for."""
    found: list[tuple[bool, bool]] = []
    stock = sharded.ds_comm.allgather_fn

    def gather(chosen: list[int]) -> None:
        _, shards = built()

        def watched(output: Tensor, local: Tensor, **options: Any) -> Any:
            mine, sent, arrives = (x.untyped_storage().data_ptr() for x in (shards.weights[0].shard, local, output))
            found.append((sent == mine, sent == arrives))
            return stock(output, local, **options)

        monkeypatch.setattr(sharded.ds_comm, "allgather_fn", watched)
        shards.gather([shards.weights[i] for i in chosen]).wait()

    for chosen, place in (([0], (True, False)), ([0, 1], (True, False)), ([0, 2], (False, True))):
        found.clear()
        on_threads(2, gather, chosen)
        assert place in found


def read_and_written() -> None:
    params, shards = built()
    weight, p = shards.weights[1], params[1]
    before = weight.shard.view(torch.uint8).clone()
    p.all_gather()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(p.data, masters()[1].bfloat16())
    p.partition([p], has_been_updated=True)  # nobody has changed it
    assert torch.equal(weight.shard.view(torch.uint8), before) and weight.bf16_shard is Bf16Shard.ABSENT
    assert bool(p.ds_tensor.isnan().all())  # what reads past the closures
    p.all_gather()
    with torch._C.DisableTorchFunctionSubclass():
        p.data[0, 0] = 4 * masters()[1].abs().max()
    p.partition([p], has_been_updated=True)
    value = masters()[1].clone()
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


def walk_through_states() -> None:
    params, shards = built()
    weight, p = shards.weights[1], params[1]
    assert (weight.gathered, weight.bf16_shard) == (Gathered.SHARDED, Bf16Shard.ABSENT)
    handle = shards.gather([weight])
    assert weight.gathered is Gathered.IN_FLIGHT
    handle.wait()
    assert weight.gathered is Gathered.UNSHARDED_FP8
    weight.leave()
    assert weight.gathered is Gathered.SHARDED
    with shards.bf16_shards([weight]):
        assert weight.bf16_shard is Bf16Shard.MADE
        with shards.bf16_shards([weight]):
            pass
        assert weight.bf16_shard is Bf16Shard.MADE and not bool(p.ds_tensor.isnan().any())
    assert weight.bf16_shard is Bf16Shard.ABSENT and bool(p.ds_tensor.isnan().all())
    weight.set_bf16(True)
    assert weight.bf16_shard is Bf16Shard.KEPT
    write_first(p)
    assert (weight.bf16_shard is Bf16Shard.WRITTEN) == (dist.get_rank() == 0)
    weight.set_bf16(False)
    assert bool(p.ds_tensor.isnan().all()) == (dist.get_rank() != 0)  # what was written counts until the next step
    weight.set_bf16(True)
    refresh(shards)
    assert weight.bf16_shard is Bf16Shard.KEPT and not bool(p.ds_tensor.isnan().any())
    weight.set_bf16(False)
    write_first(p)
    refresh(shards)
    assert weight.bf16_shard is Bf16Shard.ABSENT and bool(p.ds_tensor.isnan().all())


def write_first(p: Any) -> None:
    """Write the first element, which rank 0 has, as a reader does."""
    p.all_gather()
    with torch._C.DisableTorchFunctionSubclass():
        p.data[0, 0] += 4 * masters()[1].abs().max()
    p.partition([p], has_been_updated=True)


def test_a_weight_and_its_bf16_shard_go_through_the_states_of_their_tables() -> None:
    on_threads(2, walk_through_states)


def released() -> None:
    params, shards = built()
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
    params, shards = built()
    shards.persistent = params
    params[0].all_gather(shards.persistent)
    assert all(p.ds_status == ZeroParamStatus.AVAILABLE for p in params)
    assert torch.equal(params[1]._fp8.data.view(torch.uint8), expected(1))
    assert torch.equal(params[3].data, masters()[3].bfloat16())


def test_what_persists_is_gathered_in_its_own_dtype() -> None:
    on_threads(2, persistent)


def of_two_engines() -> None:
    """Weights of an engine in FP8 and of a reference model, in one list, as `GatheredParameters` has them."""
    params, _ = built()
    others = [sharded_parameter(10 + i, value) for i, value in enumerate(masters())]
    share_readers(torch.nn.ParameterList(others))
    assert all(isinstance(hooks_of(p), Bf16ParamHooks) for p in others)
    for first in (params[0], others[0]):
        mixed = [params[0], others[0], params[3], others[1]]
        first.all_gather(mixed)
        with torch._C.DisableTorchFunctionSubclass():
            for p, i in zip(mixed, (0, 0, 3, 1), strict=True):
                assert torch.equal(p.data, masters()[i].bfloat16())
        first.partition(mixed)
        assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in mixed)


def test_one_read_may_be_of_weights_of_several_engines() -> None:
    on_threads(2, of_two_engines)


def test_hooks_can_be_removed() -> None:
    def removed() -> bool:
        p = sharded_parameter(0, masters()[0])
        before = p.all_gather, p.partition
        Bf16ParamHooks(p).remove()
        return bool((p.all_gather, p.partition) == before)

    assert on_threads(1, removed) == [True]
