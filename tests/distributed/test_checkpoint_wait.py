"""File work of one rank that takes longer than the process group's time-out: the others wait, and hear how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import training
from support.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

GROUP_TIMEOUT = 4.0
SLOW = 1.5 * GROUP_TIMEOUT


@pytest.fixture(scope="module")
def impatient_ranks() -> Iterator[RankPool]:
    """A pool of two whose collectives fail after GROUP_TIMEOUT."""
    pool = RankPool(2, group_timeout=GROUP_TIMEOUT)
    yield pool
    pool.close()


@contextmanager
def slow(name: str, slow_rank: int) -> Iterator[None]:
    """A function of fp8_ds.checkpoint.folders takes SLOW seconds on one rank, once."""
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    stock, calls = getattr(folders, name), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if dist.get_rank() == slow_rank and calls[0] == 1:
            time.sleep(SLOW)
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, name, run)
        yield


def waits(folder: str, name: str, slow_rank: int) -> list[str]:
    from fp8_ds.engine import ranks

    ranks.SAY_SECONDS = 1.0
    engine = base.build(2, {})
    training.train(engine, 1)
    if name != "damage":
        with slow(name, slow_rank), training.log_lines() as said:
            engine.save_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
        with slow(name, slow_rank), training.log_lines() as said:
            engine.load_checkpoint(folder)
    training.destroy(engine)
    again = base.build(2, {}, seed=1)
    assert again.load_checkpoint(folder)[0] is not None
    training.destroy(again)
    return [line for line in said if "not done yet" in line]


@pytest.mark.parametrize(("name", "slow_rank"), [("damage", 0), pytest.param("record", 1, marks=pytest.mark.slow)])
def test_ranks_wait_for_file_work_longer_than_the_time_out(
    impatient_ranks: RankPool, tmp_path: Path, name: str, slow_rank: int
) -> None:
    said, by_other = impatient_ranks.run(waits, str(tmp_path), name, slow_rank)
    what = "load_checkpoint" if name == "damage" else "save_checkpoint"
    assert said and all(f"{what}: " in line and f"ranks [{slow_rank}] are not done yet" in line for line in said)
    assert by_other == []


def dies_while_others_wait(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    if dist.get_rank() == 1:
        folders.damage = lambda *_: os._exit(9)
    engine.load_checkpoint(folder)


def test_a_rank_that_dies_while_others_wait_is_an_error(impatient_ranks: RankPool, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died"):
        impatient_ranks.run(dies_while_others_wait, str(tmp_path))
    assert time.monotonic() - start < 60


def one_raises(kind: str) -> list[str]:
    import torch.distributed as dist

    from fp8_ds.engine.saving import all_do

    def work() -> int:
        if dist.get_rank() == 1:
            raise {"error": ZeroDivisionError, "exit": SystemExit}[kind]("by zero")
        return 7

    assert all_do("count", dist.get_rank) == ([0, 1], [])
    done, failed = all_do("count", work)
    assert done == [7, None]
    return failed


@pytest.mark.parametrize(("kind", "name"), [("error", "ZeroDivisionError"), ("exit", "SystemExit")])
def test_whatever_a_rank_raises_in_its_work_is_known_on_all(ranks: Any, kind: str, name: str) -> None:
    for failed in ranks(2).run(one_raises, kind):
        assert failed == [f"rank 1: {name}: by zero"]


# --- what is said ---
