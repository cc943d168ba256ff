"""Gathers of any runs, over any number of ranks, of any dtype: the owner's bytes everywhere, and the bytes counted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.distributed


def gather_cases(num: int, seed: int) -> int:
    """`num` random layouts; each rank checks every byte of its buffer. Returns how many kinds of gather there were."""
    import torch.distributed as dist

    from fp8_ds.comm.gather import gather_method, gather_runs, gathered_bytes
    from fp8_ds.zero.layout import Run

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = random.Random(seed)  # the same on all ranks
    methods = set()
    for _ in range(num):
        dtype = generator.choice([torch.uint8, torch.bfloat16, torch.float32])
        size = generator.choice([1, 7, 64, 1000])
        owners = [r for r in range(world) if generator.random() < 0.8]
        is_even = generator.random() < 0.3
        runs, end = [], generator.randrange(4)
        for owner in owners:
            numel = size if is_even else generator.randrange(1, size + 1)
            runs.append(Run(owner, end, end + numel))
            end += numel + (0 if is_even else generator.randrange(4))
        free_bytes = generator.choice([0, 256])
        total = end + generator.randrange(4)
        truth = torch.tensor([generator.randrange(200) for _ in range(total)]).to(dtype)
        buffer = torch.full((total,), 255, dtype=dtype)
        for run in runs:
            if run.rank == rank:
                buffer[run.start : run.stop] = truth[run.start : run.stop]
        expected = torch.full((total,), 255, dtype=dtype)
        for run in runs:
            if world > 1:
                expected[run.start : run.stop] = truth[run.start : run.stop]
        moved = gather_runs(group, buffer, runs, free_bytes)
        assert torch.equal(buffer, expected), (runs, dtype, free_bytes)
        assert moved == gathered_bytes(runs, world, buffer.element_size(), free_bytes)
        assert moved >= sum(run.numel for run in runs) * buffer.element_size()
        methods.add(gather_method(runs, world, buffer.element_size(), free_bytes))
    return len(methods)


@pytest.mark.parametrize("num", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_gather_brings_every_byte_of_its_owner(ranks: Any, world_size: int, num: int) -> None:
    assert ranks(world_size).run(gather_cases, num, world_size)[0] >= 3
