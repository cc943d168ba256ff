"""The pool of ranks that all tests of this folder run on: what a caller learns of a rank that fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own, since its ranks are killed."""
    pool = RankPool(2)
    yield pool
    pool.close()


def sum_of_ranks(factor: int) -> int:
    value = torch.tensor(factor * (1 + dist.get_rank()))
    dist.all_reduce(value)
    return int(value)


def number() -> int:
    return dist.get_rank()


def process() -> int:
    return os.getpid()


GROUPS: list[Any] = []


def make_groups(num_kept: int) -> int:
    """Makes two process groups and keeps some of them; how many torch had before."""
    num_known = len(dist.distributed_c10d._world.pg_map)
    made = [dist.new_group(), dist.new_group()]
    GROUPS.extend(made[:num_kept])
    return num_known


def sum_in_the_kept_group() -> int:
    value = torch.tensor(1)
    dist.all_reduce(value, group=GROUPS[0])
    return int(value)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"said by {rank}")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_every_rank_answers_in_order_with_what_it_was_given(pool: RankPool) -> None:
    assert pool.run(sum_of_ranks, 5) == [15, 15]
    assert pool.run(number) == [0, 1]


def test_a_rank_that_raises_shows_its_traceback_and_the_pool_goes_on(pool: RankPool) -> None:
    before = pool.run(process)
    with pytest.raises(RankError, match=r"rank 1:\nTraceback(.|\n)*ValueError: said by 1"):
        pool.run(raise_on, 1)
    assert pool.run(process) == before


def test_a_rank_that_dies_is_named_and_the_next_call_starts_new_ranks(pool: RankPool) -> None:
    before = pool.run(process)
    with pytest.raises(RankError, match="rank 1 died; its log is "):
        pool.run(die_on, 1)
    assert not set(pool.run(process)) & set(before)


def test_a_call_that_takes_too_long_is_ended(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pool.run(process)
    monkeypatch.setattr(pool, "timeout", 3.0)
    with pytest.raises(RankError, match=r"ranks \[1\] did not answer within 3.0 s and were killed"):
        pool.run(hang_on, 1)
    monkeypatch.undo()
    assert not set(pool.run(process)) & set(before)


def test_process_groups_that_a_call_has_left_are_ended_and_those_that_are_kept_are_not(pool: RankPool) -> None:
    """Each has three threads of gloo."""
    before = pool.run(make_groups, 0)
    assert pool.run(make_groups, 0) == before
    assert pool.run(make_groups, 1) == before
    assert pool.run(make_groups, 0) == [number + 1 for number in before]
    assert pool.run(sum_in_the_kept_group) == [2, 2]


class Interrupted(Exception):
    """As pytest's time-out raises in the middle of a call."""


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(pool: RankPool) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    pool.run(process)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            pool.run(hang_on, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pool.run(process) == pool.run(process)
