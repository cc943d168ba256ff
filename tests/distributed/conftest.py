"""One pool of ranks per world size for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from fp8_ds.testing.ranks import RankPool

MAX_THREADS = 120
"""Of a rank that the next test still gets. Engines leave process groups that something keeps, each with three threads
of gloo, which wake up all the time: after half an hour ranks had a thousand, and every test took twice as long."""


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


@pytest.fixture(autouse=True)
def few_threads(pools: dict[int, RankPool]) -> Iterator[None]:
    yield
    for one in pools.values():
        if one.num_threads() > MAX_THREADS:
            one.close()
