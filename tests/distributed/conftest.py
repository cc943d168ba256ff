"""One pool of ranks per world size for the whole session."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ranks import RankPool

MAX_THREADS = 45
"""Of a rank that the next test still gets. A pipeline's engine leaves its ten process groups (DeepSpeed's p2p module
keeps the last grid, autograd's hooks the others), each with three threads of gloo that wake up a hundred times a
second: a rank with 120 takes 5 % of a core at rest. To start ranks anew takes a second."""


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """By world size."""
    found: dict[int, RankPool] = {}
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """`ranks(n).run(function, ...)` calls a module-level function on n ranks, the same processes within a test."""

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    return pool


@pytest.fixture(scope="session")
def drift(ranks: Callable[[int], RankPool]) -> Callable[[int, dict[str, Any]], float]:
    """`drift(n, model)` is `test_zero.drift_of_gradient_dtype` with n micro-batches a step, measured once a session."""
    from test_zero import NUM_STEPS, drift_of_gradient_dtype

    found: dict[str, float] = {}

    def measured(accumulation: int, model: dict[str, Any]) -> float:
        asked = repr((accumulation, model))
        if asked not in found:
            found[asked] = ranks(1).run(drift_of_gradient_dtype, accumulation, NUM_STEPS, model)[0]
        return found[asked]

    return measured


@pytest.fixture(autouse=True)
def few_threads(pools: dict[int, RankPool]) -> Iterator[None]:
    yield
    for one in pools.values():
        if one.num_threads() > MAX_THREADS:
            one.settle()
        if one.num_threads() > MAX_THREADS:
            one.close()
