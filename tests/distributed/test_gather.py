"""Uneven runs arrive whole on every rank, by every method, in the bytes that were announced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import count_collectives

from fp8_ds.comm.collectives import max_reduce
from fp8_ds.comm.gather import gather_method, gather_runs, gathered_bytes
from fp8_ds.comm.layout import ShardRange

pytestmark = pytest.mark.distributed

# Elements of each rank, by method and world size; a hole of 3 elements lies between runs where the method allows it.
CASES = {
    ("even", 2): (64, 64),
    ("even", 4): (5, 5, 5, 5),
    ("padded", 2): (100, 99),
    ("padded", 3): (200, 200, 198),
    ("padded", 4): (100, 100, 100, 97),
    ("broadcast", 2): (0, 50),
    ("broadcast", 3): (40, 7, 1),
    ("broadcast", 4): (0, 33, 0, 80),
    ("balanced", 2): (0, 600),  # 256 bytes each in uint8, and 88 left over
    ("balanced", 3): (1000, 7, 1),
    ("balanced", 4): (0, 900, 300, 1700),
}
BALANCED_TOO_SMALL = {2: (0, 50), 3: (100, 5, 1), 4: (0, 33, 0, 80)}


def runs_of(numels: tuple[int, ...], hole: int) -> list[ShardRange]:
    runs, start = [], hole
    for rank, numel in enumerate(numels):
        if numel:
            runs.append(ShardRange(rank, start, start + numel))
            start += numel + hole
    return runs


def gather(
    numels: tuple[int, ...], hole: int, dtype: torch.dtype, free_bytes: int, max_broadcasts: int = 16
) -> dict[str, Any]:
    """Each rank fills its run with values of its own, and everything else with 250; then all gather."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8_ds.comm.gather.MAX_BROADCASTS", max_broadcasts)
        return gather_all(numels, hole, dtype, free_bytes)


def gather_all(numels: tuple[int, ...], hole: int, dtype: torch.dtype, free_bytes: int) -> dict[str, Any]:
    runs, rank = runs_of(numels, hole), dist.get_rank()
    buffer = torch.full((runs[-1].stop + 5,), 250, dtype=dtype)
    expected = buffer.clone()
    for run in runs:
        values = (torch.arange(run.numel) + 37 * run.rank) % 241
        expected[run.start : run.stop] = values.to(dtype)
        if run.rank == rank:
            buffer[run.start : run.stop] = values.to(dtype)
    with count_collectives() as count:
        returned = gather_runs(dist.group.WORLD, buffer, runs, free_bytes)
    return {
        "right": torch.equal(buffer, expected),
        "method": gather_method(runs, len(numels), buffer.element_size(), free_bytes),
        "returned": returned,
        "announced": gathered_bytes(runs, len(numels), buffer.element_size(), free_bytes),
        "seen": count.gather_bytes + count.num_bytes["all_to_all"] + count.num_bytes["all_reduce"],
        "calls": dict(count.calls),
    }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("method", "world_size"), CASES)
def test_runs_arrive_in_the_announced_bytes(ranks: Any, method: str, world_size: int, dtype: torch.dtype) -> None:
    numels = CASES[method, world_size]
    max_broadcasts = 0 if method == "balanced" else 16
    for result in ranks(world_size).run(gather, numels, 0 if method == "even" else 3, dtype, 0, max_broadcasts):
        assert result["right"]
        assert result["method"] == method
        assert result["returned"] == result["announced"] == result["seen"] > 0


@pytest.mark.parametrize("world_size", BALANCED_TOO_SMALL)
def test_what_is_too_small_for_equal_shares_is_added_up(ranks: Any, world_size: int) -> None:
    for result in ranks(world_size).run(gather, BALANCED_TOO_SMALL[world_size], 3, torch.bfloat16, 0, 0):
        assert result["right"] and result["method"] == "balanced" and result["calls"] == {"all_reduce": 1}
        assert result["returned"] == result["announced"] == result["seen"]


@pytest.mark.parametrize("numels", [(40, 0, 1), (0, 40, 0)])
def test_small_uneven_gather_is_one_padded_collective(ranks: Any, numels: tuple[int, ...]) -> None:
    for result in ranks(3).run(gather, numels, 3, torch.bfloat16, 1000):
        assert result["right"] and result["method"] == "padded"
        assert result["returned"] == result["seen"] == 3 * 40 * 2


def reduce_max(num: int) -> tuple[list[float], int]:
    values = torch.arange(num, dtype=torch.float32) * (1 - 2 * dist.get_rank())
    with count_collectives() as count:
        max_reduce(dist.group.WORLD, values)
    return values.tolist(), count.calls["all_reduce"]


def test_max_reduce_takes_the_largest_of_all_ranks(ranks: Any) -> None:
    assert ranks(2).run(reduce_max, 3) == [([0.0, 1.0, 2.0], 1)] * 2
    assert ranks(2).run(reduce_max, 0) == [([], 0)] * 2
    assert ranks(1).run(reduce_max, 3) == [([0.0, 1.0, 2.0], 0)]
