"""How many graphs of a function torch.compile may make for an engine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo

from fp8_ds.engine import graphs
from fp8_ds.engine.engine import Fp8Engine


@pytest.mark.parametrize(("before", "after"), [(8, 32), (3, 3), (64, 64)])
def test_more_graphs_than_torchs_own_number_and_no_others_than_a_user_says(before: int, after: int) -> None:
    with torch._dynamo.config.patch(recompile_limit=before):
        graphs.allow_more()
        assert torch._dynamo.config.recompile_limit == after


def test_torchs_own_number_is_what_is_taken_for_it() -> None:
    """Of this torch: with another one engines would be left with that."""
    assert torch._dynamo.config._config["recompile_limit"].default == 8


@pytest.mark.parametrize("is_in_fp8", [False, True])
def test_an_engine_in_fp8_that_compiles_may_make_more(is_in_fp8: bool) -> None:
    class Stock:
        module, optimizer = torch.nn.Linear(2, 2), None
        _fp8_hooks: ClassVar[list[Any]] = []

        def zero_optimization_partition_weights(self) -> bool:
            return False

        def compile(self, backend: str = "inductor", compile_kwargs: Any = None) -> None:
            pass

    engine: Any = object.__new__(type("Engine", (Fp8Engine, Stock), {"fp8": object() if is_in_fp8 else None}))
    with torch._dynamo.config.patch(recompile_limit=8):
        engine.compile(compile_kwargs={})
        assert torch._dynamo.config.recompile_limit == (graphs.LIMIT if is_in_fp8 else 8)
