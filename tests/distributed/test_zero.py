"""FP8 ZeRO against one rank, against the masters, and on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

STAGES = (1, 2, 3)


def run_steps(stage: int, accumulation: int, num_steps: int, fp8: dict[str, Any], model: dict[str, Any]) -> Any:
    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation)
    engine = training.build(config, model)
    first = training.fp8_state(engine)
    losses = training.train(engine, num_steps)
    result = first, losses, training.fp8_state(engine), training.full_masters(engine), engine.fp8_report()
    training.destroy(engine)
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_start_from_the_same_bytes_as_one(ranks: Any, stage: int) -> None:
    one = ranks(1).run(run_steps, stage, 2, 1, {}, {})[0]
    for state, *_ in ranks(2).run(run_steps, stage, 1, 1, {}, {}):
        for name, (data, scale_inv) in one[0].items():
            assert torch.equal(data, state[name][0]) and torch.equal(scale_inv, state[name][1]), name
