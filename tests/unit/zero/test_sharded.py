"""FP8 shards of ZeRO-3 and their states, on a stub host whose ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from support.zero3_host import hooked_shards, refresh, shard_masters
from torch import Tensor

from fp8_ds.zero import sharded
from fp8_ds.zero.sharded import Bf16Shard, Gathered


def test_nothing_is_sent_from_memory_that_a_handle_frees_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards stay; copies of some that lie apart are in the buffer, which streams are recorded for."""
    found: list[tuple[bool, bool]] = []
    stock = sharded.ds_comm.allgather_fn

    def gather(chosen: list[int]) -> None:
        _, shards = hooked_shards()

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


def walk_through_states() -> None:
    params, shards = hooked_shards()
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
        p.data[0, 0] += 4 * shard_masters()[1].abs().max()
    p.partition([p], has_been_updated=True)


def test_a_weight_and_its_bf16_shard_go_through_the_states_of_their_tables() -> None:
    on_threads(2, walk_through_states)
