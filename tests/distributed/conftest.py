"""One pool of ranks per world size for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from fp8_ds.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(function, ...)` calls a module-level function on n ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for one in pools.values():
        one.close()
