"""What cannot work raises on every rank, after one exchange of refusals (test_fingerprint.py) and nothing else; so do
parameters that ranks hand over in different orders, where DeepSpeed adds up what does not belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks
from torch import nn

pytestmark = pytest.mark.distributed

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "UnsupportedError", "offload_optimizer"),
    ({"zero_optimization": {"stage": 0}}, "UnsupportedError", "zero_optimization.stage: 0"),
    ({"fp8": {"linear": {"recipe": "auto"}}}, "ConfigError", "fp8.linear.recipe"),
    ({"fp8": {"no_such_key": 1}}, "ConfigError", "fp8.no_such_key"),
    ({"fp8": {"optimizer": {"master": "e4m19"}}}, "ConfigError", "fp8.optimizer.master"),
    (
        {"fp8": {"activations": {"cross_entropy_chunk_mem_const": 8}}},
        "UnsupportedError",
        "fp8.activations.cross_entropy",
    ),
]


def configured(change: dict[str, Any]) -> dict[str, Any]:
    return training.ds_config(1, change.get("fp8", {}), **{key: value for key, value in change.items() if key != "fp8"})


def refused(config: dict[str, Any], model: nn.Module) -> tuple[str, str, int]:
    """(error, message, collectives issued until then)."""
    import deepspeed
    from support.collectives import count_collectives

    import fp8_ds

    with count_collectives() as count:
        try:
            deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        except fp8_ds.UnsupportedError as error:
            return "UnsupportedError", str(error), sum(count.calls.values())
        except fp8_ds.ConfigError as error:
            return "ConfigError", str(error), sum(count.calls.values())
    return "nothing", "", sum(count.calls.values())


@on_ranks(2)
def test_a_refused_configuration_raises_on_all_ranks_before_any_collective_of_training() -> None:
    model = nn.Linear(16, 16)
    model.weight.allreduce = False  # type: ignore[assignment]
    attempts = [(configured(change), nn.Linear(16, 16), error, key) for change, error, key in WRONG]
    for config, net, error, key in [
        *attempts,
        (training.ds_config(1, {}), model, "UnsupportedError", "expert-parallel"),
    ]:
        found, message, num_collectives = refused(config, net)
        assert found == error and key in message
        # The exchange in which ranks hear of refusals (fp8_ds/engine/rank_agreement.py), sizes first, and no other.
        assert num_collectives == 2
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert float(ones) == 2


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_model_without_an_eligible_linear_is_refused_on_all_ranks(stage: int) -> None:
    from fp8_ds.errors import ConfigError

    with pytest.raises(ConfigError, match="at least one linear"):
        training.build(training.ds_config(stage, {"linear": {"filter_fqns": ["blocks", "lm_head"]}}))


@pytest.mark.parametrize(("stage", "how"), [(2, "order"), (3, "order"), (2, "groups")])
@on_ranks(2)
def test_another_order_on_one_rank_is_refused_on_all_by_the_name_of_the_first(stage: int, how: str) -> None:
    from fp8_ds.errors import ConfigError

    def groups(net: Any) -> list[dict[str, Any]]:
        params, is_other = list(net.parameters()), dist.get_rank() == 1
        if how == "order" and is_other:
            params = [*params[:2], *params[:1:-1]]
        cut = 4 if how == "groups" and is_other else 6
        return [{"params": params[:cut]}, {"params": params[cut:]}]

    theirs = "lm_head.weight in group 0" if how == "order" else "blocks.0.up.bias in group 1"
    usual = "blocks.0.norm.bias in group 0" if how == "order" else "blocks.0.up.bias in group 0"
    with pytest.raises(ConfigError, match=f"model_parameters: .*'{usual}' on rank 0 .*'{theirs}' on rank 1"):
        training.build(training.ds_config(stage, {}), groups=groups)
