"""Moving scales on a GPU: the CPU's numbers, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8_ds.scaling.moving import MovingScales

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_factors_are_those_of_a_cpu_and_nothing_waits(request: pytest.FixtureRequest) -> None:
    names = [f"blocks.{k}.weight" for k in range(300)]
    here, there = (MovingScales(names, [2] * 300, device) for device in ("cpu", "cuda"))
    amax = torch.rand(600)
    on_gpu = amax.cuda()
    request.getfixturevalue("no_waiting")
    found = []
    for _ in range(50):
        there.advance()
        found.append(there.widened(on_gpu))
    torch.cuda.set_sync_debug_mode("default")
    for each in found:
        here.advance()
        assert each.cpu().equal(here.widened(amax))
