"""ZeRO-3's gradients are cut for all ranks as DeepSpeed cuts them, bit for bit, copied or sent from where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.collectives import count_collectives

from fp8_ds.comm import collectives
from fp8_ds.comm.reduce_scatter import reduce_scatter_shares
from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.deepspeed_fixes import gradient_buffer
from fp8_ds.testing import assert_bitwise

pytestmark = pytest.mark.distributed


def both_ways(
    numels: list[int], dtype: torch.dtype, min_bytes: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Stock's shares and ours of the same tensors; how many of ours lie where a tensor that was handed in does; how
    many tensors ours hands to its one collective.

    With more than two ranks whole numbers, whose sums are exact: what is sent in other pieces is added in other order.
    """
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    generator = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(numel, generator=generator) for numel in numels]
    if dist.get_world_size() > 2 and min_bytes == SENT_EACH:
        values = [(4 * value).round() for value in values]
    tensors = [value.to(dtype) for value in values]
    stock = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch, count_collectives() as count:
        patch.setattr(collectives, "MIN_BYTES", min_bytes)
        ours = reduce_scatter_shares(tensors, dist.group.WORLD)
    assert count.calls.total() == count.calls["reduce_scatter"] == any(numels)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    num_in_place = sum(one.untyped_storage().data_ptr() in storages for one in ours if one.numel())
    return stock, ours, num_in_place, len(count.records)


COPIED, SENT_EACH = 2**20, 0


@pytest.mark.parametrize("min_bytes", [COPIED, SENT_EACH], ids=["copied", "sent each"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "numels",
    [[12], [13], [1], [6, 18, 600], [1000, 3, 1, 128, 2051, 5], [8, 12, 4], [2, 0, 5], [0, 0], [0, 16]],
    ids=lambda one: "-".join(map(str, one)),
)
def test_shares_have_stocks_bits(ranks: Any, world_size: int, numels: list[int], min_bytes: int) -> None:
    used = [numel for numel in numels if numel]
    num_equal = sum(numel % world_size == 0 for numel in used)
    if len(used) > 1 and (num_equal < 2 or min_bytes == COPIED):
        num_equal = 0
    for dtype in (torch.bfloat16, torch.float32):
        for stock, ours, num_in_place, num_sent in ranks(world_size).run(both_ways, numels, dtype, min_bytes):
            assert len(stock) == len(ours) == len(numels)
            for one, other in zip(stock, ours, strict=True):
                assert_bitwise(one, other)
            assert num_sent == num_equal + (num_equal < len(used))
            if used:
                assert num_in_place == (len(used) == num_equal == 1)


def of_one_storage() -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Stock's shares and ours of gradients that overlap, as autograd may hand them out; whether they are as before."""
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    whole = torch.arange(24, dtype=torch.float32) + dist.get_rank()
    gradients = [whole, whole.view(-1), whole[8:16]]
    before = whole.clone()
    stock = reduce_scatter_coalesced([one.clone() for one in gradients], dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", SENT_EACH)
        ours = reduce_scatter_shares(gradients, dist.group.WORLD)
    return stock, ours, whole.equal(before)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_one_storage_are_averaged_once(ranks: Any, world_size: int) -> None:
    for stock, ours, is_as_before in ranks(world_size).run(of_one_storage):
        assert is_as_before
        for one, other in zip(stock, ours, strict=True):
            assert_bitwise(one, other)


def accumulated(fp8: dict[str, Any], patched: dict[str, Any]) -> tuple[list[set[bool]], dict[str, torch.Tensor]]:
    """By micro-batch, whether shares of the blocks' gradients come in the place where DeepSpeed adds them up; and
    masters after three steps of two micro-batches."""
    engine = training.build(training.ds_config(3, fp8, gradient_accumulation_steps=2))
    kind, found = type(engine.optimizer), []
    stock = kind.partition_grads

    def partition_grads(self: Any, params: list[Any], shares: list[torch.Tensor]) -> list[torch.Tensor]:
        places = [gradient_buffer(self, p) for p in params]
        if len(params) > 1:
            found.append({a.data_ptr() == b.data_ptr() for a, b in zip(places, shares, strict=True)})
        return stock(self, params, shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", 0)
        patch.setattr(kind, "partition_grads", partition_grads)
        for name, value in patched.items():
            patch.setattr(deepspeed_fixes, name, value)
        training.train(engine, 3)
    masters = training.full_masters(engine)
    training.destroy(engine)
    return found, masters


def without_places(tensors: Any, group: Any, places: Any) -> list[torch.Tensor]:
    return reduce_scatter_shares(tensors, group)


@pytest.mark.parametrize("fp8", [{}, {"optimizer": {"states": "fp8", "master": "e4m19"}}], ids=["fp32", "e4m19"])
def test_the_first_gradients_of_a_step_come_where_they_are_added_up(ranks: Any, fp8: dict[str, Any]) -> None:
    copied = ranks(2).run(accumulated, fp8, {"reduce_scatter_shares": without_places})
    for (found, masters), (found_copied, masters_copied) in zip(
        ranks(2).run(accumulated, fp8, {}), copied, strict=True
    ):
        assert found == [{True}, {False}] * 3 and found_copied == [{False}] * 6
        for name, master in masters.items():
            assert_bitwise(master, masters_copied[name])
