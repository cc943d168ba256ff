"""FP8 ZeRO is the same training on any number of ranks, and its weights are the quantised masters."""

from __future__ import annotations

from typing import Any

import pytest
import training

pytestmark = pytest.mark.distributed

NUM_STEPS = 12
# 50 and 70 are no multiples of 16; the tiny linear has fewer weights than 4 ranks of ZeRO-3 have shards for.
RAGGED = {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}
# One block, so that the first and the last partition of ZeRO-1/2 hold embedding and head only: no FP8 weight at all.
NO_WEIGHT_ON_SOME_RANKS = {"width": 50, "hidden": 18, "num_blocks": 1}


def run_steps(
    stage: int, accumulation: int, num_steps: int, fp8: dict[str, Any], model: dict[str, Any], **overrides: Any
) -> dict[str, Any]:
    """Train; return what a test compares: FP8 bytes at both ends, masters, losses."""
    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    engine = training.build(config, model)
    first = training.fp8_state(engine)
    losses = training.train(engine, num_steps)
    result = {
        "first": first,
        "losses": losses,
        "last": training.fp8_state(engine),
        "masters": training.full_masters(engine),
    }
    training.destroy(engine)
    return result


def drift_of_gradient_dtype(accumulation: int, num_steps: int, model: dict[str, Any]) -> float:
    """Largest loss difference that summing gradients in fp32 instead of bf16 makes on one rank (stage 2)."""
    bf16, fp32 = (
        run_steps(2, accumulation, num_steps, {}, model, **extra)["losses"]
        for extra in ({}, {"data_types": {"grad_accum_dtype": "fp32"}})
    )
    return max(abs(a - b) for a, b in zip(bf16, fp32, strict=True))


def check_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        training.assert_fp8_equals(result["last"], results[0]["last"])
        training.assert_fp8_follows_masters(result["last"], result["masters"])
        assert result["losses"] == results[0]["losses"]


@pytest.mark.parametrize(
    ("stage", "world_size", "accumulation", "model"),
    [(2, 2, 2, RAGGED), (1, 4, 1, NO_WEIGHT_ON_SOME_RANKS), (3, 4, 1, RAGGED)],
)
def test_training_on_many_ranks_is_training_on_one(
    ranks: Any, drift: Any, stage: int, world_size: int, accumulation: int, model: dict[str, Any]
) -> None:
    total = world_size * accumulation
    allowed = 3 * drift(total, model)
    one = ranks(1).run(run_steps, stage, total, NUM_STEPS, {}, model)[0]
    many = ranks(world_size).run(run_steps, stage, accumulation, NUM_STEPS, {}, model)
    check_ranks(many)
    training.assert_fp8_equals(many[0]["first"], one["first"])
    differences = [abs(a - b) for a, b in zip(many[0]["losses"], one["losses"], strict=True)]
    assert max(differences) <= allowed, (max(differences), allowed)
    assert many[0]["losses"][-1] < 0.9 * many[0]["losses"][0]  # it is training that was compared
