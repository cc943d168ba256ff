"""Ranks killed at random moments of a save: the run goes on, bit for bit, from a complete checkpoint."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training

from fp8_ds.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


def resume_and_save(folder: str, stage: int, expected: dict[int, dict[str, Any]] | None, fate: Any = None) -> Any:
    """Load the newest checkpoint, compare it with what was saved, train a step, save it, and say how long that took.

    Args:
        expected: state by step; None: this is the first save.
        fate: (rank, seconds after the save began until it is killed).
    """
    import torch.distributed as dist

    engine = base.build(stage, {}, seed=0 if expected is None else 1)
    if expected is not None:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        base.assert_same(base.snapshot(engine), expected[engine.global_steps])
    training.train(engine, 1, first_step=engine.global_steps)
    now = base.snapshot(engine)
    if dist.get_rank() == 0:
        torch.save(now, f"{folder}/state{engine.global_steps}.pt")
    dist.barrier()
    begin = time.monotonic()
    if fate is not None and dist.get_rank() == fate[0]:  # by the kernel: a save takes 30 ms
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, fate[1])
    engine.save_checkpoint(folder, tag="newest")
    return time.monotonic() - begin, engine.global_steps


def kill_rounds(folder: Path, stage: int, num_kills: int, seed: int) -> tuple[int, int]:
    """(kills that left the old checkpoint, kills after which the new one was there)."""
    generator = random.Random(seed)
    pool = RankPool(2)
    outcomes = [0, 0]
    try:
        duration, step = pool.run(resume_and_save, str(folder), stage, None)[0]
        for _ in range(num_kills):
            pool.close()
            fate = generator.randrange(2), generator.uniform(1e-6, 1.3 * duration)
            killer = threading.Thread(target=kill_the_others, args=(pool, fate[0]))
            states = {
                step: torch.load(folder / f"state{step}.pt")
                for step in (step, step + 1)
                if (folder / f"state{step}.pt").exists()
            }
            pool._start()
            killer.start()
            try:
                duration, step = pool.run(resume_and_save, str(folder), stage, states, fate)[0]
                outcomes[1] += 1
            except RankError as error:
                assert "died" in str(error), error
                header = newest_header(folder)
                outcomes[header["global_steps"] > step] += 1
                step = header["global_steps"]
            killer.join()
    finally:
        pool.close()
    return outcomes[0], outcomes[1]


def kill_the_others(pool: RankPool, victim: int) -> None:
    """A moment after the victim, as a launcher does."""
    processes = list(pool._processes)
    processes[victim].join(timeout=120)
    time.sleep(0.2)
    for process in processes:
        process.kill()


def newest_header(folder: Path) -> dict[str, Any]:
    from fp8_ds.checkpoint import manifest as m

    manifest = m.read_manifest(folder / m.find(folder, (folder / m.LATEST).read_text()))
    assert manifest is not None, "latest points to a checkpoint that is not complete"
    return manifest.header


def test_a_run_killed_while_saving_resumes_bit_for_bit_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    kill_rounds(tmp_path, stage=2, num_kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [2, 3])
def test_twenty_kills_at_random_moments_of_a_save(tmp_path: Path, stage: int) -> None:
    old, new = kill_rounds(tmp_path, stage, num_kills=20, seed=stage)
    print(f"ZeRO-{stage}: {old} kills left the old checkpoint, {new} the new one")
    assert old + new == 20
    assert old >= 3, "the kills did not fall into the saves"
