"""State of ours that this version does not know, and what is said where a run has other layers in FP8."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fp8_ds.checkpoint.state import _how_to_keep, restore_state, wrong_entries
from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.plan.plan import Plan, make_plan


def test_how_to_keep_the_layers_names_those_of_a_checkpoint_of_keys_that_are_gone() -> None:
    """A user adds what is said to the block that there is."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "lm_head": nn.Linear(32, 32)})
    rows = [
        replace(row, converted=False, reason="num_layers_at_start_in_bf16") if "layers.0." in row.fqn else row
        for row in make_plan(model, LinearConfig()).layers
    ]
    now = LinearConfig(filter_fqns=("lm_head", "layers.-1.", "layers.-2."))
    told = _how_to_keep(Plan(tuple(rows)), {"enabled": True}, make_plan(model, now))
    again = LinearConfig.model_validate({**now.model_dump(), **block_of(told)})
    assert [layer.converted for layer in make_plan(model, again).layers] == [row.converted for row in rows]


def block_of(told: str) -> dict[str, Any]:
    """The "linear" block that is said."""
    block: dict[str, Any] = json.loads(told[told.index("{") : told.rindex("}") + 1])
    return block


def test_an_unknown_version_is_refused() -> None:
    context: Any = None
    with pytest.raises(ConfigError, match="expected version 1, got 99"):
        wrong_entries(context, {"version": 99}, module_only=False, with_optimizer=True, of_other_shards=False)


def test_settings_of_older_versions_that_are_gone_are_named() -> None:
    old: dict[str, dict[str, Any]] = {
        "optimizer": {"states": "fp8", "master": "fp32", "master_format": "fp32", "release_clipping": "per_tensor"},
        "schedule": {"fp32_states_from_step": 100, "bf16_below_lr": 1e-5},
        "zero": {"keep_bf16_shard": True},
        "guard": {"return_after": 500},
        "tensor_parallel": {"scales": "shared"},
    }
    plan, said = make_plan(nn.Sequential(nn.Linear(32, 32)), LinearConfig()), list[str]()
    context: Any = SimpleNamespace(plan=plan, precision=None, release=None, history=None)
    restore_state(context, {"config": old, "plan": plan.to_state()}, said.append, module_only=True, of_a_stage=False)
    gone = {"optimizer.master", "release_clipping", "fp32_states_from_step 100", "bf16_below_lr 1e-05"}
    gone |= {"keep_bf16_shard", "guard.return_after 500", "tensor_parallel.scales"}
    assert {name for name in gone for line in said if name in line} == gone and len(said) == len(gone)
