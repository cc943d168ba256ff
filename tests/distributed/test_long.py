"""2,000 steps with saves, resumes and changes of world size: no memory and no file descriptor is lost on the way."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import training
from support.ranks import RankPool

from fp8_ds.tools.convert import convert

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(3600)]

WORLDS = (2, 2, 1, 2, 2, 3, 2, 2)
STEPS = 250
EVERY = 50
"""Steps between saves, and between looks at the process."""
MICRO_BATCHES = 6
SETTLED = 100
"""Steps after which nothing is allocated for the first time."""
ALLOWED_KIB = 4096
"""More within a round."""
ALLOWED_KIB_OVER_ROUNDS = 8192
"""More from the end of a process's first round to the end of its last: 1,250 steps and five engines later. Stock
DeepSpeed keeps about 0.6 MiB of each engine, and so do we (thirty of them, one after another); of steps and saves
nothing is kept."""


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def one_round(folder: str, world: int, is_first: bool, is_universal: bool) -> dict[str, Any]:
    import torch.distributed as dist

    fp8 = {"optimizer": {"states": "fp8"}, "linear": {"recipe": "delayed"}}
    checkpoint = {"checkpoint": {"load_universal": True}} if is_universal else {}
    engine = base.build(3, fp8, seed=0, gradient_accumulation_steps=MICRO_BATCHES // world, **checkpoint)
    if not is_first:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
    first, losses, kib, descriptors = engine.global_steps, [], {}, {}
    for step in range(0, STEPS, EVERY):
        losses += training.train(engine, EVERY, first_step=first + step)
        engine.save_checkpoint(folder, tag=f"global_step{engine.global_steps}")
        kib[step + EVERY], descriptors[step + EVERY] = resident_kib(), num_descriptors()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/global_step{engine.global_steps - EVERY}", ignore_errors=True)
    found = {"first": first, "last": engine.global_steps, "losses": losses, "kib": kib, "descriptors": descriptors}
    training.destroy(engine)
    return found


@pytest.fixture
def patient_ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools that wait for a round of hundreds of steps."""
    pools: dict[int, RankPool] = {}
    yield lambda world: pools.setdefault(world, RankPool(world, timeout=1800))
    for pool in pools.values():
        pool.close()


def test_2000_steps_lose_no_memory_and_no_descriptor(patient_ranks: Any, tmp_path: Path) -> None:
    rounds: list[list[dict[str, Any]]] = []
    before = 0
    for world in WORLDS:
        changes = before not in (0, world)
        if changes:
            shutil.rmtree(tmp_path / "universal", ignore_errors=True)
            convert(tmp_path, tmp_path / "universal", "universal", stage=3)
        rounds.append(patient_ranks(world).run(one_round, str(tmp_path), world, before == 0, changes))
        before = world
    assert rounds[-1][0]["last"] == STEPS * len(WORLDS) == 2000
    for index, of_ranks in enumerate(rounds):
        for rank, found in enumerate(of_ranks):
            assert found["first"] == index * STEPS
            assert found["losses"] == of_ranks[0]["losses"]
            grown = found["kib"][STEPS] - found["kib"][SETTLED]
            print(f"round {index}, rank {rank}: {found['kib']} KiB, {found['descriptors']} descriptors")
            assert grown < ALLOWED_KIB, (index, rank, found["kib"])
            assert found["descriptors"][STEPS] <= found["descriptors"][SETTLED], (index, rank, found["descriptors"])
    for rank in range(2):  # of the same processes: what each engine leaves behind does not add up
        ends = [of_ranks[rank] for world, of_ranks in zip(WORLDS, rounds, strict=True) if world == 2]
        kib, descriptors = ([found[key][STEPS] for found in ends] for key in ("kib", "descriptors"))
        print(f"rank {rank}: {kib} KiB and {descriptors} descriptors at the ends of its rounds")
        assert kib[-1] - kib[0] < ALLOWED_KIB_OVER_ROUNDS, kib
        assert descriptors[-1] <= descriptors[0], descriptors
    mean = [sum(of_ranks[0]["losses"][-50:]) / 50 for of_ranks in rounds]
    assert mean[-1] < mean[0]
    assert all(after < 1.05 * before for before, after in itertools.pairwise(mean)), mean
