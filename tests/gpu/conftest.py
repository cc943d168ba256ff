"""Pools of ranks on GPUs with NCCL; skipped where there are fewer GPUs."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from support.ranks import RankPool


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what asks fp8_ds.host in this process: tests/conftest.py says cpu, for all other tests."""
    if torch.cuda.is_available():  # kernels/ runs in Triton's interpreter, too
        monkeypatch.setenv("DS_ACCELERATOR", "cuda")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`gpu_ranks(n).run(function, ...)` calls a module-level function on n ranks, one GPU each."""
    pools: dict[int, RankPool] = {}
    os.environ["DS_ACCELERATOR"] = "cuda"

    def pool(world_size: int) -> RankPool:
        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs, {torch.cuda.device_count()} here")
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, timeout=240)
        return pools[world_size]

    yield pool
    for one in pools.values():
        one.close()
