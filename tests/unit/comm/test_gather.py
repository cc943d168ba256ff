"""How uneven runs are gathered is decided by the bytes it costs, and what one rank sends is what the other expects."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.properties import check, settled
from support.threads import on_threads

from fp8_ds.comm import gather
from fp8_ds.comm.collectives import ByteCounter, max_reduce
from fp8_ds.comm.gather import equal_parts, gather_method, gather_runs, gathered_bytes
from fp8_ds.comm.layout import ShardRange


def runs(*numels: int, gap: int = 0) -> list[ShardRange]:
    found, start = [], 0
    for rank, numel in enumerate(numels):
        if numel:
            found.append(ShardRange(start, start + numel, rank))
        start += numel + gap
    return found


@pytest.mark.parametrize(
    ("numels", "method", "num_bytes"),
    [
        ((8, 8, 8, 8), "even", 32),
        ((100, 100, 100, 98), "padded", 400),  # 400 <= 1.02 * 398
        ((100, 100, 100, 80), "broadcast", 380),
        ((0, 50, 50, 50), "broadcast", 150),
        ((7,), "none", 0),
        ((0, 0), "none", 0),
    ],
)
def test_method_follows_the_waste(numels: tuple[int, ...], method: str, num_bytes: int) -> None:
    assert gather_method(runs(*numels), len(numels), 1) == method
    assert gathered_bytes(runs(*numels), len(numels), 1) == num_bytes


def test_many_owners_balance_their_shares_first() -> None:
    """A broadcast of each would take as many times the latency of one."""
    few, many = runs(*[100_000] * 15, 1), runs(*[100_000] * 16, 1)
    assert gather_method(few, 17, 2) == "broadcast" and gather_method(many, 17, 2) == "balanced"
    assert gathered_bytes(many, 17, 2) == 3_200_002 + 3_200_002 // (17 * 128) * 128
    assert gather_method(runs(*[100] * 100, 10), 101, 2, free_bytes=20_200) == "padded"


def test_equal_runs_with_holes_between_are_not_gathered_in_place() -> None:
    assert gather_method(runs(8, 8, gap=8), 2, 1) == "padded"


def test_small_volume_is_padded_whatever_the_waste() -> None:
    uneven = runs(100, 1, 0, 0)
    assert gather_method(uneven, 4, 2, free_bytes=800) == "padded"
    assert gathered_bytes(uneven, 4, 2, free_bytes=800) == 800
    assert gather_method(uneven, 4, 2, free_bytes=799) == "broadcast"
    assert gathered_bytes(uneven, 4, 2, free_bytes=799) == 202


def test_counter_keeps_the_finished_step_and_starts_anew() -> None:
    counter = ByteCounter()
    counter.fp8, counter.hp, counter.num_amax_reduces = 5, 7, 1
    counter.end_step()
    assert counter.last is not None and (counter.last.total, counter.last.num_amax_reduces) == (12, 1)
    assert counter.total == 0 and counter.num_amax_reduces == 0


@settled(100)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 12))
def test_every_element_in_a_part_goes_from_its_owner_to_the_parts_rank(sizes: list[int], part: int) -> None:
    owned = [ShardRange(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    ranks = range(len(sizes))
    into, out_of = zip(*(equal_parts(owned, part, rank) for rank in ranks), strict=True)
    for owner in ranks:
        for rank in ranks:
            elements = range(owned[owner].start, owned[owner].stop)
            expected = len([element for element in elements if element // part == rank])
            assert into[rank][owner] == out_of[owner][rank] == expected


# --- on ranks ---


@st.composite
def gathers(draw: st.DrawFn, world: int) -> dict[str, Any]:
    """Runs of some of the ranks, in order, alike or not, with gaps between them."""
    size = draw(st.sampled_from([1, 7, 64, 1000]))
    is_even = draw(st.booleans())
    runs, end = [], draw(st.integers(0, 3))
    for owner in draw(st.sets(st.integers(0, world - 1), min_size=0).map(sorted)):
        numel = size if is_even else draw(st.integers(1, size))
        runs.append((end, end + numel, owner))
        end += numel + (0 if is_even else draw(st.integers(0, 3)))
    return {
        "runs": runs,
        "total": end + draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])),
        "free_bytes": draw(st.sampled_from([0, 256])),
        "max_broadcasts": draw(st.sampled_from([0, 16])),
        "seed": draw(st.integers(0, 2**20)),
    }


def gathered(case: dict[str, Any]) -> str:
    """How it was done. Each rank checks every byte of its buffer."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    runs, free_bytes, total = [ShardRange(*run) for run in case["runs"]], case["free_bytes"], case["total"]
    generator = torch.Generator().manual_seed(case["seed"])
    truth = torch.randint(0, 200, (total,), generator=generator).to(case["dtype"])
    buffer, expected = (torch.full((total,), 255, dtype=case["dtype"]) for _ in range(2))
    for run in runs:
        expected[run.start : run.stop] = truth[run.start : run.stop]
        if run.rank == rank:
            buffer[run.start : run.stop] = truth[run.start : run.stop]
    moved = gather_runs(group, buffer, runs, free_bytes)
    assert torch.equal(buffer, expected)
    assert moved == gathered_bytes(runs, world, buffer.element_size(), free_bytes)
    assert moved >= sum(run.numel for run in runs) * buffer.element_size()
    return gather_method(runs, world, buffer.element_size(), free_bytes)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_gather_brings_every_byte_of_its_owner(world_size: int) -> None:
    methods: set[str] = set()

    def brings_all(case: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "MAX_BROADCASTS", case["max_broadcasts"])
            methods.update(on_threads(world_size, gathered, case))

    check(100, gathers(world_size), brings_all)
    assert len(methods) >= 4 and "balanced" in methods


def reduce_max(num: int) -> list[float]:
    values = torch.arange(num, dtype=torch.float32) * (1 - 2 * dist.get_rank())
    max_reduce(dist.group.WORLD, values)
    return values.tolist()


def test_max_reduce_takes_the_largest_of_all_ranks() -> None:
    assert on_threads(2, reduce_max, 3) == [[0.0, 1.0, 2.0]] * 2
    assert on_threads(2, reduce_max, 0) == [[]] * 2
