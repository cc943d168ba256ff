"""File work of one rank that takes longer than the process group's time-out: the others wait, and hear how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
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


def waits(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    stock, num_calls = folders.damage, 0

    def damage(*args: Any) -> str:
        nonlocal num_calls
        num_calls += 1
        if dist.get_rank() == 0 and num_calls == 1:
            time.sleep(SLOW)
        return stock(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "damage", damage)
        assert engine.load_checkpoint(folder)[0] is not None
    training.destroy(engine)


def test_ranks_wait_for_file_work_longer_than_the_time_out(impatient_ranks: RankPool, tmp_path: Path) -> None:
    impatient_ranks.run(waits, str(tmp_path))


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
