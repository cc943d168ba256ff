"""Which layers a request means where ranks have layers of their own, as pipeline stages do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fp8_ds.config import LinearConfig, ScheduleConfig
from fp8_ds.engine.precision import LayerPrecision
from fp8_ds.errors import ConfigError
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

OTHERS = ["1.up", "2.up"]
"""Layers of the other stage; this one's are 10.up and 11.up."""


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The other rank makes the same calls; "patterns": what they ask for."""
    other: dict[str, Any] = {"patterns": []}

    def all_gather_object(everyone: list[Any], mine: Any) -> None:
        layers = [[name for name in OTHERS if pattern in name] for pattern in other["patterns"]]
        everyone[:] = [mine, layers if isinstance(mine, list) else mine]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return other


def precision(**block: Any) -> LayerPrecision:
    model = nn.ModuleDict({f"{i}": nn.ModuleDict({"up": nn.Linear(32, 32)}) for i in (10, 11)})
    config = LinearConfig()
    apply_plan(model, make_plan(model, config), config, "cpu")
    schedule = ScheduleConfig.model_validate(block)
    return LayerPrecision(model, lambda names: None, schedule, None, lambda line: None)


def test_a_name_of_another_stage_is_no_part_of_a_name_of_this_one(two_stages: dict[str, Any]) -> None:
    two_stages["patterns"] = ["1.up"]
    one = precision()
    assert one.request(["1.up"], "bf16") == ["1.up"]  # and not 11.up
    for other in (one, precision(layers={"1.up": "bf16"})):
        other.update(0)
        assert other.in_bf16 == frozenset()


def test_overrides_are_those_of_all_stages_in_every_checkpoint(two_stages: dict[str, Any]) -> None:
    """DeepSpeed's pipelines save one model file for all stages."""
    two_stages["patterns"] = ["up"]
    one = precision()
    assert one.request(["up"], "bf16") == ["1.up", "10.up", "11.up", "2.up"]
    saved = one.state_dict()
    assert saved["overrides"] == dict.fromkeys(["1.up", "10.up", "11.up", "2.up"], "bf16")
    again = precision()
    again.load_state_dict(saved)
    again.update(0)
    assert again.in_bf16 == {"10.up", "11.up"} and again.state_dict()["overrides"] == saved["overrides"]


def test_layers_that_an_older_guard_sent_for_a_while_stay_in_bf16(two_stages: dict[str, Any]) -> None:
    two_stages["patterns"] = ["up"]
    one = precision()
    stays = {"10.up": (4, 7, False), "2.up": (4, 7, False), "11.up": (4, 7, True)}  # (length, until, is_over)
    one.load_state_dict({"overrides": {"10.up": "fp8"}, "stays": stays, "lr": None, "in_bf16": []})
    for step in (3, 100):
        one.update(step)
        assert one.in_bf16 == {"10.up"}
    assert one.state_dict()["overrides"] == {"10.up": "bf16", "2.up": "bf16"}
    one.request(["up"], "schedule")
    one.update(101)
    assert one.in_bf16 == frozenset()


def test_a_name_of_no_stage_is_refused(two_stages: dict[str, Any]) -> None:
    two_stages["patterns"] = ["head"]
    with pytest.raises(ConfigError, match=r"\['head'\]"):
        precision().request(["head"], "bf16")
