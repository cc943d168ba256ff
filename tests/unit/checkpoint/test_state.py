"""What is said where a run has other layers in FP8 than its checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.checkpoint.state import _how_to_keep
from fp8_ds.config import LinearConfig
from fp8_ds.nn.plan.plan import Plan, make_plan


def test_how_to_keep_the_layers_turns_off_what_this_run_leaves_in_bf16_at_its_ends() -> None:
    """A user adds what is said to the block that there is."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "lm_head": nn.Linear(32, 32)})
    was = LinearConfig(num_layers_at_start_in_bf16=1)
    now = LinearConfig(num_layers_at_end_in_bf16=2)
    plan = make_plan(model, was)
    told = _how_to_keep(plan, {"enabled": True}, make_plan(model, now), now)
    linear = block_of(told)
    again = LinearConfig.model_validate({**now.model_dump(), **linear})
    assert [layer.converted for layer in make_plan(model, again).layers] == [layer.converted for layer in plan.layers]
    assert "num_layers" not in _how_to_keep(plan, {"enabled": True}, plan, LinearConfig())


def test_how_to_keep_a_plan_without_fp8_is_to_turn_it_off() -> None:
    model, now = nn.ModuleDict({"up": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)}), LinearConfig()
    none = make_plan(model, LinearConfig(filter_fqns=("up", "lm_head")), may_be_empty=True)
    assert 'set "fp8.enabled" to false' in _how_to_keep(none, {"enabled": True}, make_plan(model, now), now)


def mixture(num_experts: int) -> nn.ModuleDict:
    """Experts beside a linear."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    if not hasattr(mixtral, "MixtralExperts"):
        pytest.skip("experts are modules of their own before transformers 5")
    config = mixtral.MixtralConfig(hidden_size=32, intermediate_size=32, num_local_experts=num_experts)
    return nn.ModuleDict({"experts": mixtral.MixtralExperts(config), "q_proj": nn.Linear(32, 32)})


def block_of(told: str) -> dict[str, Any]:
    """The "linear" block that is said."""
    block: dict[str, Any] = json.loads(told[told.index("{") : told.rindex("}") + 1])
    return block


def test_many_experts_of_a_checkpoint_are_said_to_want_one_launch() -> None:
    """On a device where they are a loop, no block keeps them in FP8."""
    model, now = mixture(20), LinearConfig()
    plan, current = make_plan(model, now), make_plan(model, now, device=torch.device("cpu"))
    assert [row.converted for row in plan.layers] == [True] * 3 != [row.converted for row in current.layers]
    assert "one launch" in _how_to_keep(plan, {"enabled": True}, current, now)
    assert "one launch" not in _how_to_keep(current, {"enabled": True}, plan, now)


def test_many_experts_that_a_limit_left_in_bf16_stay_so_by_name() -> None:
    """Of a checkpoint from a device where they were a loop."""
    model, now = mixture(20), LinearConfig()
    plan, current = make_plan(model, now, device=torch.device("cpu")), make_plan(model, now)
    linear = block_of(_how_to_keep(plan, {"enabled": True}, current, now))
    again = make_plan(model, LinearConfig.model_validate({**now.model_dump(), **linear}))
    assert [row.fqn for row in again.layers if row.converted] == ["q_proj"]


def test_experts_that_a_checkpoint_has_no_row_of_were_in_bf16() -> None:
    model, now = mixture(4), LinearConfig()
    current = make_plan(model, now)
    old = Plan(tuple(row for row in current.layers if not row.num_experts))
    linear = block_of(_how_to_keep(old, {"enabled": True}, current, now))
    again = make_plan(model, LinearConfig.model_validate({**now.model_dump(), **linear}))
    assert [row.fqn for row in again.layers if row.converted] == ["q_proj"]
    assert len([row for row in current.layers if row.converted]) == 3
