"""The pool of ranks that all tests of this folder run on: what a caller learns of a rank that fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own, since its ranks are killed."""
    pool = RankPool(2)
    yield pool
    pool.close()


def rank_and_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail(how: str) -> None:
    """On the second rank."""
    if dist.get_rank() == 1:
        if how == "die":
            os._exit(3)
        if how == "hang":
            time.sleep(60)
        raise ValueError("said by 1")


@pytest.mark.parametrize(
    ("how", "said", "goes_on"),
    [
        ("raise", r"rank 1:\nTraceback(.|\n)*ValueError: said by 1", True),
        ("die", "rank 1 died; its log is ", False),
        ("hang", r"ranks \[1\] did not answer within 2.0 s and were killed", False),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_has_ranks(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, how: str, said: str, goes_on: bool
) -> None:
    before = pool.run(rank_and_process)
    if how == "hang":
        monkeypatch.setattr(pool, "timeout", 2.0)
    with pytest.raises(RankError, match=said):
        pool.run(fail, how)
    monkeypatch.undo()
    after = pool.run(rank_and_process)
    assert [rank for rank, _ in after] == [0, 1]
    assert (after == before) if goes_on else not {pid for _, pid in after} & {pid for _, pid in before}


class Interrupted(Exception):
    """As pytest's time-out raises in the middle of a call."""


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(pool: RankPool) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    pool.run(rank_and_process)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            pool.run(fail, "hang")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pool.run(rank_and_process) == pool.run(rank_and_process)
