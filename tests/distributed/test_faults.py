"""A rank that dies or hangs: the others end with an error within the group's time-out and 30 s, wherever it happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import training
from support.late_flag import states_of
from support.ranks import RankError, RankPool

from fp8_ds.checkpoint import folders

pytestmark = pytest.mark.distributed

MODEL = {"width": 32, "hidden": 72, "num_blocks": 2}
GROUP_TIMEOUT = 6.0
MARGIN = 30.0
MOMENTS = ("forward", "backward", "step", "save")
STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
RELEASE = {"optimizer": {"states": "fp8", "master": "e4m11", "release": True, "release_clipping": "delayed_norm"}}


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[Callable[[float], RankPool]]:
    """A pool of three whose groups time out soon: new ranks after each death."""
    pools: dict[float, RankPool] = {}

    def pool(group_timeout: float = GROUP_TIMEOUT) -> RankPool:
        if group_timeout not in pools:
            grace = group_timeout + MARGIN
            pools[group_timeout] = RankPool(3, timeout=4 * grace, grace=grace, group_timeout=group_timeout)
        return pools[group_timeout]

    yield pool
    for one in pools.values():
        one.close()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_: Any) -> None:
    """As a host that has lost its network or hangs in a driver: there, and silent."""
    os.kill(os.getpid(), signal.SIGSTOP)


def arm(engine: Any, moment: str, fate: Callable[..., None]) -> None:
    """`fate` meets this rank in the next `moment`."""
    layer = engine.module.blocks[1].up
    if moment == "forward":
        layer.register_forward_pre_hook(fate)
    elif moment == "backward":
        layer.register_full_backward_hook(fate)
    elif moment == "step":  # between the reduction of gradients and the update
        has_fp8_states = engine.fp8.config.optimizer.states == "fp8"
        zero = engine.optimizer
        owner, name = (states_of(zero).core, "begin") if has_fp8_states else (zero.fp8.step.adam, "_state")
        assert hasattr(owner, name) and not engine.fp8.config.optimizer.release
        setattr(owner, name, fate)
    elif moment == "save":
        engine.checkpoint_engine.save = fate
    elif moment == "load":
        folders.damage = fate
    else:
        raise AssertionError(moment)


def build(stage: int, fp8: dict[str, Any], seed: int = 0) -> Any:
    overrides = {"gradient_clipping": 0.0} if "release" in fp8.get("optimizer", {}) else {}
    return training.build(training.ds_config(stage, fp8, **overrides), MODEL, seed)


def train_with_a_fault(folder: str, victim: int, stage: int, fp8: dict[str, Any], moment: str, fate: str) -> None:
    import torch.distributed as dist

    engine = build(stage, fp8)
    training.train(engine, 2)
    engine.save_checkpoint(folder)
    if dist.get_rank() == victim:
        arm(engine, moment, {"die": die, "stop": stop}[fate])
    Path(folder, f"armed{dist.get_rank()}").touch()
    try:
        if moment != "load":
            training.train(engine, 2, first_step=2)
            engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
    except Exception:  # of whichever library sees first that a rank is gone
        Path(folder, f"ended{dist.get_rank()}").touch()
        raise


def kill_the_victim(pool: RankPool, folder: Path, victim: int) -> None:
    """Once the others have ended: the pool would wait for a silent rank."""
    deadline = time.monotonic() + pool.timeout
    while not all((folder / f"ended{rank}").exists() for rank in range(3) if rank != victim):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    for process in pool._processes[victim : victim + 1]:
        process.kill()


def survivors_end(pool: RankPool, folder: Path, victim: int, *arguments: Any) -> float:
    """Seconds until the last survivor raised. Fails if one hangs or does not raise."""
    killer = threading.Thread(target=kill_the_victim, args=(pool, folder, victim))
    killer.start()
    with pytest.raises(RankError, match=f"rank {victim} died"):
        pool.run(train_with_a_fault, str(folder), victim, *arguments)
    killer.join()
    begin = max((folder / f"armed{rank}").stat().st_mtime for rank in range(3))
    seconds = [(folder / f"ended{rank}").stat().st_mtime - begin for rank in range(3) if rank != victim]
    assert not (folder / f"ended{victim}").exists()
    return max(seconds)


def resumes(folder: str, stage: int, fp8: dict[str, Any]) -> list[float]:
    engine = build(stage, fp8, seed=1)
    assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == 2
    losses = training.train(engine, 1, first_step=2)
    training.destroy(engine)
    return losses


@pytest.mark.parametrize(
    ("stage", "fp8", "moment", "victim"),
    [
        (3, RELEASE, "backward", 2),
        pytest.param(1, STATES, "save", 1, marks=pytest.mark.slow),
        (2, {}, "load", 1),
    ],
    ids=["3-release-backward", "1-states-save", "2-load"],
)
def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    mortal_ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], moment: str, victim: int
) -> None:
    seconds = survivors_end(mortal_ranks(GROUP_TIMEOUT), tmp_path, victim, stage, fp8, moment, "die")
    assert seconds < GROUP_TIMEOUT + MARGIN
    losses = mortal_ranks(GROUP_TIMEOUT).run(resumes, str(tmp_path), stage, fp8)
    assert losses[0] == losses[1] == losses[2]


def test_a_rank_that_falls_silent_ends_the_others_at_the_groups_time_out(mortal_ranks: Any, tmp_path: Path) -> None:
    seconds = survivors_end(mortal_ranks(GROUP_TIMEOUT), tmp_path, 0, 2, {}, "step", "stop")
    assert GROUP_TIMEOUT - 1 < seconds < GROUP_TIMEOUT + MARGIN


ANYWHERE = [
    pytest.param(stage, fp8, moment, (stage + number) % 3, id=f"{stage}-{name}-{moment}-rank{(stage + number) % 3}")
    for name, fp8, stages in (("fp32", {}, (1, 2, 3)), ("states", STATES, (1, 2, 3)), ("release", RELEASE, (2, 3)))
    for stage in stages
    for number, moment in enumerate(MOMENTS)
    if (fp8, moment) != (RELEASE, "step")  # the update is in the backward
]


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["die", "stop"])
@pytest.mark.parametrize(("stage", "fp8", "moment", "victim"), ANYWHERE)
def test_within_60_seconds_and_30_after_a_kill_or_a_silence_anywhere(
    mortal_ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], moment: str, victim: int, fate: str
) -> None:
    seconds = survivors_end(mortal_ranks(60.0), tmp_path, victim, stage, fp8, moment, fate)
    assert seconds < 60.0 + MARGIN


# --- ranks that are late ---

LATE = 1


def train_late(delay: float) -> list[float]:
    import torch.distributed as dist

    if dist.get_rank() == LATE:
        time.sleep(delay)
    engine = build(3, {})
    losses = training.train(engine, 2)
    training.destroy(engine)
    return losses


def test_a_rank_that_comes_late_is_waited_for(mortal_ranks: Any) -> None:
    pool = mortal_ranks(GROUP_TIMEOUT)
    in_time = pool.run(train_late, 0.0)
    assert pool.run(train_late, 2.0) == in_time


def load_late(folder: str) -> None:
    import torch.distributed as dist

    engine = build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    damage, num_calls = folders.damage, 0

    def late(*args: Any) -> str:
        nonlocal num_calls
        num_calls += 1
        if dist.get_rank() == LATE and num_calls == 1:
            time.sleep(1.5 * GROUP_TIMEOUT)
        return damage(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "damage", late)
        assert engine.load_checkpoint(folder)[0] is not None
    training.destroy(engine)


def test_ranks_wait_for_file_work_longer_than_the_time_out(mortal_ranks: Any, tmp_path: Path) -> None:
    mortal_ranks(GROUP_TIMEOUT).run(load_late, str(tmp_path))


def too_late() -> str:
    import torch.distributed as dist

    from fp8_ds.errors import Fp8DsError

    if dist.get_rank() == LATE:
        time.sleep(1.5 * GROUP_TIMEOUT)
    begin = time.monotonic()
    with pytest.raises((Fp8DsError, RuntimeError)) as caught:
        build(3, {})
    assert time.monotonic() - begin < GROUP_TIMEOUT + MARGIN
    return str(caught.value)


def test_a_rank_that_comes_too_late_is_an_error_that_says_what_to_look_for(mortal_ranks: Any) -> None:
    pool = mortal_ranks(GROUP_TIMEOUT)
    for message in pool.run(too_late):
        assert "expected 3 ranks at the start of deepspeed.initialize" in message
        assert "Look for a rank that died" in message
    pool.close()  # last: what comes after would start new ranks
