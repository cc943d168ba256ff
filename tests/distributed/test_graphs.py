"""Gradients of CUDA graphs over several micro-batches, replays played by hand: a CPU has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

from fp8_ds.zero import graphs

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def masters_with_replays(
    stage: int, fp8: dict[str, Any], is_contiguous: bool, replays: bool, is_told: bool
) -> dict[str, torch.Tensor]:
    """After two steps of three micro-batches.

    Args:
        replays: whether what a backward left is written over as soon as the next forward begins.
        is_told: what `graphs.are_replayed` says.
    """
    zero = {"contiguous_gradients": is_contiguous}
    engine = training.build(
        training.ds_config(stage, fp8, gradient_accumulation_steps=3, zero_optimization={"stage": stage, **zero})
    )
    left: list[torch.Tensor] = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: left.append(p.grad.detach()) if p.grad is not None else None)
        for p in engine.module.parameters()
    ]
    stock = graphs.are_replayed
    graphs.are_replayed = lambda: is_told
    try:
        for step in range(2):
            for number, batch in enumerate(training.micro_batches(step, 3)):
                if replays and number == 1:
                    assert left, "the first micro-batch's gradients were seen"
                    for grad in left:
                        grad.fill_(float("nan"))
                left.clear()
                engine.backward(engine(batch))
                engine.step()
            left.clear()
    finally:
        graphs.are_replayed = stock
        for hook in hooks:
            hook.remove()
    found = training.full_masters(engine)
    training.destroy(engine)
    return found


@pytest.mark.parametrize(
    "stage, fp8, is_contiguous",
    [(1, {}, True), (1, STATES, True), (2, {}, False), (2, STATES, True)],
    ids=["1-fp32", "1-e4m11", "2-fp32", "2-e4m11"],
)
def test_gradients_that_wait_leave_what_the_next_replay_writes(
    ranks: Any, stage: int, fp8: dict[str, Any], is_contiguous: bool
) -> None:
    expected, got, spoiled = (
        ranks(1).run(masters_with_replays, stage, fp8, is_contiguous, replays, is_told)[0]
        for replays, is_told in ((False, False), (True, True), (True, False))
    )
    for name, master in expected.items():
        assert torch.equal(master, got[name]), name
    assert any(not torch.equal(expected[name], master) for name, master in spoiled.items()), "nothing was written over"


def test_a_process_without_graphs_has_none() -> None:
    import torch._inductor.cudagraph_trees as trees

    assert callable(trees.get_manager)
    assert not graphs.are_replayed()
