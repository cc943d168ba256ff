"""How many graphs of a function torch.compile may make for an engine."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo


@pytest.mark.parametrize(("before", "after"), [(8, 32), (3, 3), (64, 64)])
def test_more_graphs_than_torchs_own_number_and_no_others_than_a_user_says(before: int, after: int) -> None:
    pytest.importorskip("deepspeed")
    from fp8_ds.engine.engine import allow_more_graphs

    with torch._dynamo.config.patch(recompile_limit=before):
        allow_more_graphs()
        assert torch._dynamo.config.recompile_limit == after


def test_torchs_own_number_is_what_is_taken_for_it() -> None:
    """Of this torch: with another one engines would be left with that."""
    assert torch._dynamo.config._config["recompile_limit"].default == 8
