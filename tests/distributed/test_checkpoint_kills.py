"""Ranks killed at random moments of a save: the run goes on, bit for bit, from a complete checkpoint."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from support import HANG
from support.ranks import RankError, RankPool
from test_checkpoint_faults import refusal

pytestmark = pytest.mark.distributed

TORN = "newest.*.incomplete"
STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def resume_and_save(
    folder: str, stage: int, fp8: dict[str, Any], expected: dict[int, dict[str, Any]] | None, fate: Any = None
) -> Any:
    """Load the newest checkpoint, compare it with what was saved, train a step, save it, and say how long that took.

    Args:
        expected: state by step; None: this is the first save. A step that was trained before comes out the same.
        fate: (rank, seconds after the save began until it is killed).
    """
    import torch.distributed as dist

    engine = base.build(stage, fp8, seed=0 if expected is None else 1)
    if expected is not None:
        for torn in sorted(Path(folder).glob(TORN)):
            assert "is of a save that did not end" in refusal(engine, folder, tag=torn.name)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        base.assert_same(base.snapshot(engine), expected[engine.global_steps])
    training.train(engine, 1, first_step=engine.global_steps)
    now = base.snapshot(engine)
    if expected is not None and engine.global_steps in expected:  # the run before was killed after this step
        base.assert_same(now, expected[engine.global_steps])
    if dist.get_rank() == 0:
        torch.save(now, f"{folder}/state{engine.global_steps}.pt")
    dist.barrier()
    begin = time.monotonic()
    if fate is not None and dist.get_rank() == fate[0]:  # by the kernel: a save takes 30 ms
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, fate[1])
    engine.save_checkpoint(folder, tag="newest")
    return time.monotonic() - begin, engine.global_steps


def kill_rounds(folder: Path, stage: int, fp8: dict[str, Any], num_kills: int, seed: int) -> Counter[str]:
    """`num_kills` of them before a save had ended on all ranks; those that came too late do not count.

    Returns:
        how many left the "old" checkpoint, and the "new" one; after how many a "torn" one lay beside it; steps done
        "again".
    """
    generator, pool = random.Random(seed), RankPool(2)
    kills: Counter[str] = Counter()
    try:
        duration, step = pool.run(resume_and_save, str(folder), stage, fp8, None)[0]
        while kills["old"] + kills["new"] < num_kills:
            pool.close()
            fate = generator.randrange(2), generator.uniform(1e-6, 1.3 * duration)
            killer = threading.Thread(target=kill_the_others, args=(pool, fate[0]))
            paths = {number: folder / f"state{number}.pt" for number in (step, step + 1)}
            states = {number: torch.load(path) for number, path in paths.items() if path.exists()}
            kills["torn"] += any(folder.glob(TORN))
            kills["again"] += step + 1 in states
            pool._start()
            killer.start()
            try:
                duration, step = pool.run(resume_and_save, str(folder), stage, fp8, states, fate)[0]
            except RankError as error:
                assert "died" in str(error), error
                found = newest_step(folder)
                assert found in (step, step + 1)
                kills["old" if found == step else "new"] += 1
                step = found
            killer.join()
    finally:
        pool.close()
    return kills


def kill_the_others(pool: RankPool, victim: int) -> None:
    """A moment after the victim, as a launcher does."""
    processes = list(pool._processes)
    processes[victim].join(timeout=HANG)
    time.sleep(0.2)
    for process in processes:
        process.kill()


def newest_step(folder: Path) -> int:
    from fp8_ds.checkpoint import folders

    manifest = folders.read_manifest(folder / folders.folders_of(folder, (folder / folders.LATEST).read_text())[0])
    assert manifest is not None, "latest points to a checkpoint that is not complete"
    return int(manifest.header["global_steps"])


def test_a_run_killed_while_saving_resumes_bit_for_bit_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    # This seed kills rank 0 half way through a save, then rank 1 early in the next: none comes too late, as a rule.
    kill_rounds(tmp_path, 3, STATES, num_kills=2, seed=8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "fp8"), [(2, {}), (3, {}), (2, STATES), (3, STATES)])
def test_twenty_kills_at_random_moments_of_a_save(tmp_path: Path, stage: int, fp8: dict[str, Any]) -> None:
    kills = kill_rounds(tmp_path, stage, fp8, num_kills=20, seed=stage)
    print(f"ZeRO-{stage} {fp8}: {kills}")
    assert min(kills["old"], kills["torn"], kills["again"]) >= 3, "the kills did not fall into the saves"
