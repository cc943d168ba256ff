"""How uneven runs are gathered is decided by the bytes it costs, and what one rank sends is what the other expects."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.properties import settled
from support.threads import on_threads

from fp8_ds.comm.collectives import ByteCounter, max_reduce
from fp8_ds.comm.gather import equal_parts, gather_method, gather_runs, gathered_bytes
from fp8_ds.comm.layout import ShardRange


def runs(*numels: int, gap: int = 0) -> list[ShardRange]:
    found, start = [], 0
    for rank, numel in enumerate(numels):
        if numel:
            found.append(ShardRange(rank, start, start + numel))
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
    owned = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    ranks = range(len(sizes))
    into, out_of = zip(*(equal_parts(owned, part, rank) for rank in ranks), strict=True)
    for owner in ranks:
        for rank in ranks:
            expected = len([element for element in owned[owner] if element // part == rank])
            assert into[rank][owner] == out_of[owner][rank] == expected


# --- on ranks ---

ON_RANKS = [
    # Elements of each rank; the last are given to few owners' broadcasts, or balanced first.
    ("even", (64, 64)),
    ("even", (5, 5, 5, 5)),
    ("padded", (100, 99)),
    ("padded", (100, 100, 100, 97)),
    ("broadcast", (0, 50)),
    ("broadcast", (40, 7, 1)),
    ("balanced", (0, 600)),  # 256 bytes each in uint8, and 88 left over
    ("balanced", (0, 900, 300, 1700)),
    ("balanced", (0, 33, 0, 80)),  # too small for equal shares
]


def gathered(numels: tuple[int, ...], hole: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Whether every run arrives, and nothing else changes; the bytes that are announced less those returned."""
    owned, rank = runs(*numels, gap=hole), dist.get_rank()
    buffer = torch.full((owned[-1].stop + 5,), 250, dtype=dtype)
    expected = buffer.clone()
    for run in owned:
        values = ((torch.arange(run.numel) + 37 * run.rank) % 241).to(dtype)
        expected[run.start : run.stop] = values
        if run.rank == rank:
            buffer[run.start : run.stop] = values
    num_bytes = gather_runs(dist.group.WORLD, buffer, owned)
    return torch.equal(buffer, expected), num_bytes - gathered_bytes(owned, len(numels), buffer.element_size())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("method", "numels"), ON_RANKS)
def test_runs_arrive_in_the_announced_bytes(
    monkeypatch: pytest.MonkeyPatch, method: str, numels: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr("fp8_ds.comm.gather.MAX_BROADCASTS", 0 if method == "balanced" else 16)
    hole = 0 if method == "even" else 3
    assert gather_method(runs(*numels, gap=hole), len(numels), 2) == method
    assert on_threads(len(numels), gathered, numels, hole, dtype) == [(True, 0)] * len(numels)


def reduce_max(num: int) -> list[float]:
    values = torch.arange(num, dtype=torch.float32) * (1 - 2 * dist.get_rank())
    max_reduce(dist.group.WORLD, values)
    return values.tolist()


def test_max_reduce_takes_the_largest_of_all_ranks() -> None:
    assert on_threads(2, reduce_max, 3) == [[0.0, 1.0, 2.0]] * 2
    assert on_threads(2, reduce_max, 0) == [[]] * 2
