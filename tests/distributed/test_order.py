"""Parameters that ranks hand to ZeRO in different orders are refused, where stock code adds up what does not belong
together."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import training

pytestmark = pytest.mark.distributed


def in_another_order(stage: int, how: str) -> str:
    from fp8_ds.errors import ConfigError

    def groups(net: Any) -> list[dict[str, Any]]:
        params, is_other = list(net.parameters()), dist.get_rank() == 1
        if how == "order" and is_other:
            params = [*params[:2], *params[:1:-1]]
        cut = 4 if how == "groups" and is_other else 6
        return [{"params": params[:cut]}, {"params": params[cut:]}]

    try:
        training.destroy(training.build(training.ds_config(stage, {}), groups=groups))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "how"), [(2, "order"), (3, "order"), (2, "groups")])
def test_another_order_on_one_rank_is_refused_on_all(ranks: Any, stage: int, how: str) -> None:
    first, other = ranks(2).run(in_another_order, stage, how)
    theirs = "lm_head.weight in group 0" if how == "order" else "blocks.0.up.bias in group 1"
    usual = "blocks.0.norm.bias in group 0" if how == "order" else "blocks.0.up.bias in group 0"
    assert first == other
    assert "model_parameters: expected the same" in first
    assert f"'{usual}' on rank 0 of the group and '{theirs}' on rank 1" in first


def test_one_order_on_all_ranks_is_none(ranks: Any) -> None:
    assert ranks(2).run(in_another_order, 2, "") == ["", ""]
