"""Weights that a step does not use have a gradient of zeros in every stage, where DeepSpeed's ZeRO-3 takes an old one;
and what FP8 computes does not depend on our repairs of DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks
from torch import Tensor

from fp8_ds.config import DEEPSPEED_FIXES

pytestmark = pytest.mark.distributed


def steps(stage: int, fp8: dict[str, Any], accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms, and masters at the end, of steps that use the second block in all micro-batches, one, or none."""
    engine = training.build(training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation))
    block, norms = engine.module.blocks[1], []
    for step, uses in enumerate(([True] * accumulation, [False] * accumulation, [False, True][-accumulation:]) * 2):
        batches = training.micro_batches(step, 2 * accumulation)[dist.get_rank() :: 2]
        for batch, is_used in zip(batches, uses, strict=True):
            if not is_used:
                block.forward = lambda x: x
            engine.backward(engine(batch))
            block.__dict__.pop("forward", None)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    found = norms, training.full_masters(engine)
    training.destroy(engine)
    return found


SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}


@pytest.mark.parametrize(("fp8", "accumulation"), [({}, 2), (SPLIT, 1)])
def test_stage_3_steps_as_stage_2_does(ranks: Any, fp8: dict[str, Any], accumulation: int) -> None:
    (norms, masters), _ = ranks(2).run(steps, 3, fp8, accumulation)
    (other_norms, other_masters), _ = ranks(2).run(steps, 2, fp8, accumulation)
    assert norms == pytest.approx(other_norms, rel=1e-3)
    for name, master in masters.items():
        assert float((master - other_masters[name]).abs().mean()) < 5e-4, name


@pytest.mark.parametrize("fp8", [{}, SPLIT], ids=["fp32", "e4m19"])
@on_ranks(2)
def test_a_gradient_that_zero_grad_dropped_moves_nothing(fp8: dict[str, Any]) -> None:
    """The only micro-batch that used the second block is dropped by `zero_grad`."""
    optimizer = {"params": {"lr": 3e-3, "weight_decay": 0.0, "torch_adam": True}}
    engine = training.build(training.ds_config(3, fp8, gradient_accumulation_steps=2, optimizer=optimizer))
    block, before = engine.module.blocks[1], training.full_masters(engine)
    for micro_batch, batch in enumerate(training.micro_batches(0, 4)[dist.get_rank() :: 2]):
        if micro_batch == 1:
            engine.optimizer.zero_grad()
            block.forward = lambda x: x
        engine.backward(engine(batch))
        engine.step()
    moved = {name for name, master in training.full_masters(engine).items() if not torch.equal(master, before[name])}
    training.destroy(engine)
    assert "lm_head.weight" in moved and not any(name.startswith("blocks.1.") for name in moved)


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [pytest.param(2, SPLIT, marks=pytest.mark.slow), pytest.param(3, {}, marks=pytest.mark.slow), (3, SPLIT)],
)
@on_ranks(2)
def test_a_run_without_any_repair_has_the_same_bits(stage: int, fp8: dict[str, Any]) -> None:
    found = []
    for without in ([], list(DEEPSPEED_FIXES)):
        block = fp8 | {"without_deepspeed_fixes": without}
        engine = training.build(training.ds_config(stage, block, gradient_accumulation_steps=2))
        assert engine.tput_timer.config.synchronized is bool(without)
        if stage == 3:
            assert [b.buffer is None for b in engine.optimizer.ipg_buckets.values()] == [not without]
        found.append((training.train(engine, 3), training.full_masters(engine)))
        training.destroy(engine)
    (losses, masters), (own_losses, own_masters) = found
    assert losses == own_losses
    assert all(torch.equal(master, own_masters[name]) for name, master in masters.items())


@pytest.mark.parametrize("fp8", [pytest.param({}, marks=pytest.mark.slow), SPLIT], ids=["fp32", "e4m19"])
def test_without_the_repair_stage_3_steps_by_gradients_of_earlier_steps(ranks: Any, fp8: dict[str, Any]) -> None:
    norms, _ = ranks(2).run(steps, 3, fp8, 1)[0]
    own_norms, _ = ranks(2).run(steps, 3, fp8 | {"without_deepspeed_fixes": ["stale_gradients"]}, 1)[0]
    assert norms[0] == own_norms[0]
    assert own_norms[1] > norms[1]  # the second block's gradient of the step before counts, too
