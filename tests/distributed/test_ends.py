"""The first and last layers in bf16, by number: the run is that with the same layers named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

BY_NUMBER = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
BY_NAME = {"filter_fqns": ["lm_head", "blocks.0.", "blocks.3.", "blocks.4."]}


def run(stage: int, linear: dict[str, Any]) -> dict[str, Any]:
    """Losses, what is gathered, and which blocks have FP8 linears; five blocks."""
    import deepspeed

    torch.manual_seed(0)
    config = training.ds_config(stage, {"linear": linear})
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        net = training.TinyLM(num_blocks=5)
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    losses = training.train(engine, 4)
    report = engine.fp8_report()
    kinds = [type(block.up).__name__ for block in engine.module.blocks]
    training.destroy(engine)
    return {"losses": losses, "bytes": report["gathered_fp8_bytes"], "plan": report["plan"], "kinds": kinds}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_ends_by_number_are_those_layers_by_name(ranks: Any, stage: int) -> None:
    for ours, named in zip(ranks(2).run(run, stage, BY_NUMBER), ranks(2).run(run, stage, BY_NAME), strict=True):
        assert ours["kinds"] == named["kinds"] == ["Linear", "Fp8Linear", "Fp8Linear", "Linear", "Linear"]
        assert ours["losses"] == named["losses"] and ours["losses"][-1] < ours["losses"][0]
        assert ours["bytes"] == named["bytes"] > 0
        assert "blocks.0.up (num_layers_at_start_in_bf16)" in ours["plan"]
