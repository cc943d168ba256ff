"""RankMemory changes no collective, and counts a tensor no longer than its owner holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_memory import RankMemory
from torch import Tensor

pytestmark = pytest.mark.distributed

NUMEL = 1 << 12


def collectives() -> list[Tensor]:
    """What every kind leaves in its tensors, inputs too; some work in place, on a part of their own output."""
    rank, found = dist.get_rank(), []
    whole = torch.arange(2 * NUMEL, dtype=torch.float32) + rank
    whole[0] = torch.nan
    dist.all_reduce(whole)
    found.append(whole.clone())
    dist.reduce_scatter_tensor(whole.chunk(2)[rank], whole)
    found.append(whole.chunk(2)[rank].clone())  # the other part is gloo's
    dist.all_gather_into_tensor(whole, whole.chunk(2)[rank])
    found.append(whole.clone())
    work = dist.all_reduce(whole.chunk(2)[0], async_op=True)
    work.wait()
    work.wait()
    dist.reduce(whole, dst=0)
    found.append(whole.clone() if rank == 0 else torch.zeros(1))
    parts = [torch.empty(3, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([rank, 7, 8]))
    dist.broadcast(parts[0], src=1)
    return [*found, *parts]


def with_and_without() -> tuple[list[Tensor], list[Tensor]]:
    plain = collectives()
    with RankMemory():
        return plain, collectives()


def test_collectives_are_those_of_torch(ranks: Any) -> None:
    for plain, counted in ranks(2).run(with_and_without):
        assert len(plain) == len(counted) == 6
        for left, right in zip(plain, counted, strict=True):
            assert torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0))


def live_after_each() -> tuple[set[int], int]:
    live = set()
    with RankMemory() as memory:
        for _ in range(50):
            tensor = torch.ones(NUMEL)
            dist.all_reduce(tensor)
            live.add(memory.live)
            del tensor
            live.add(memory.live)
    return live, memory.peak


def test_a_reduced_tensor_is_free_when_its_owner_drops_it(ranks: Any) -> None:
    assert ranks(2).run(live_after_each) == [({0, 4 * NUMEL}, 4 * NUMEL)] * 2
