"""2,000 steps on a GPU: no memory is lost on the way, and the host waits no more often than in stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from support.waits import host_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

NUM_STEPS = 2000
EVERY = 100
MODEL = {"width": 256, "hidden": 1024, "num_blocks": 2}
FP8 = {"linear": {"recipe": "delayed"}, "optimizer": {"states": "fp8", "master": "e4m11"}}


def many_steps(stage: int, fp8: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """(bytes allocated, times that the host has waited so far) after each EVERY steps."""
    engine = training.build(training.ds_config(stage, fp8), MODEL)
    tokens = [training.micro_batches(step, 1)[0].to(engine.device) for step in range(8)]
    allocated, waits = [], []
    with host_waits() as count:
        for step in range(NUM_STEPS):
            engine.backward(engine(tokens[step % len(tokens)]))
            engine.step()
            if (step + 1) % EVERY == 0:
                allocated.append(torch.cuda.memory_allocated())
                waits.append(len(count))
    training.destroy(engine)
    return allocated, waits


@pytest.mark.parametrize("stage", [2, 3])
def test_2000_steps_lose_no_memory_and_wait_for_nothing_that_stock_does_not(gpu_ranks: Any, stage: int) -> None:
    allocated, ours = gpu_ranks(1).run(many_steps, stage, FP8)[0]
    _, stock = gpu_ranks(1).run(many_steps, stage, None)[0]
    assert set(allocated[1:]) == {allocated[1]}, allocated
    for step, (mine, theirs) in enumerate(zip(ours, stock, strict=True), start=1):
        assert mine <= theirs, (step * EVERY, mine, theirs)
