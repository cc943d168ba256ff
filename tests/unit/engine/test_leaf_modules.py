"""What a bound on ZeRO-3's live weights must leave room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fp8_ds.engine import deepspeed_fixes, leaf_modules


def ligers_forward() -> None:
    """Stands in for the forward that liger-kernel gives a causal LM."""


ligers_forward.__module__ = "liger_kernel.transformers.model.llama"


def engine(
    loss: str,
    live: int,
    reuse: int,
    stage: int = 3,
    has_leaves: bool = True,
    key: str = "stage3_max_live_parameters",
    tied: bool = False,
) -> Any:
    """Of a model with an embedding of 5,000 weights, a head of 4,000, or the embedding's, four layers of 1,000 and a
    norm that persists."""
    model: Any = nn.Module()
    model.embedding, model.norm = nn.Linear(50, 100, bias=False), nn.Linear(1, 1)
    model.lm_head = model.embedding if tied else nn.Linear(50, 80, bias=False)
    model.layers = nn.ModuleList(nn.Linear(50, 20, bias=False) for _ in range(4))
    model.get_input_embeddings, model.get_output_embeddings = lambda: model.embedding, lambda: model.lm_head
    for p in model.parameters():
        p.ds_numel, p.ds_persist = p.numel(), p.numel() < 10
    for layer in model.layers:
        layer._z3_leaf = has_leaves
    if loss == "liger":
        model.forward = ligers_forward
    config = SimpleNamespace(
        zero_config=SimpleNamespace(max_live_parameters=live), _param_dict={"zero_optimization": {key: live}}
    )
    return SimpleNamespace(
        module=model,
        _config=config,
        zero_optimization_partition_weights=lambda: stage == 3,
        zero_max_live_parameters=lambda: config.zero_config.max_live_parameters,
        zero_max_reuse_distance=lambda: reuse,
    )


@pytest.mark.parametrize(
    ("loss", "tied", "reuse", "needed"),
    [
        ("stock", False, 0, 2_000),  # two leaves
        ("stock", False, 5_500, 3_000),  # the last two are kept, whose backward is 4,000 and 5,000 away
        ("stock", False, 9_000, 10_000),  # all four, and the embedding, between whose uses the head's two are
        ("stock", True, 1, 7_000),
        ("stock", True, 10**9, 9_000),  # all that there is
        ("liger", False, 0, 6_000),  # the head is held
        ("liger", False, 1_500, 7_000),
        ("liger", False, 10**9, 13_000),
    ],
)
def test_two_leaves_what_is_kept_and_what_is_held(loss: str, tied: bool, reuse: int, needed: int) -> None:
    assert leaf_modules.hint_on_live(engine(loss, needed, reuse, tied=tied)) is None
    line = leaf_modules.hint_on_live(engine(loss, needed - 1, reuse, tied=tied))
    assert line is not None and f"expected at least {needed:,} " in line and f"got {needed - 1:,}." in line
    assert ("Liger" in line) == (loss == "liger")


@pytest.mark.parametrize("loss", ["stock", "liger"])
def test_a_bound_that_nobody_has_set_is_one_that_suffices(loss: str) -> None:
    needed = 2_000 if loss == "stock" else 6_000
    for key in ("stage3_max_live_parameters", "max_live_parameters"):
        one = engine(loss, needed - 1, 0, key=key)
        assert deepspeed_fixes.raise_max_live_parameters(one) is None and one.zero_max_live_parameters() == needed - 1
    one = engine(loss, needed - 1, 0, key="stage")
    assert deepspeed_fixes.raise_max_live_parameters(one) is not None and one.zero_max_live_parameters() == needed
    assert deepspeed_fixes.raise_max_live_parameters(one) is None
    one.zero_max_live_parameters = lambda: 1
    assert leaf_modules.hint_on_live(one) is None  # nobody has set it: as for leaves that DeepSpeed itself makes later


@pytest.mark.parametrize("options", [{"live": 20_000}, {"live": 5, "stage": 2}, {"live": 5, "has_leaves": False}])
def test_a_bound_that_suffices_stays_and_nothing_is_said_without_leaves_or_shards(options: dict[str, Any]) -> None:
    one = engine("liger", reuse=10**9, key="stage", **options)
    assert leaf_modules.hint_on_live(one) is None and deepspeed_fixes.raise_max_live_parameters(one) is None
    assert one.zero_max_live_parameters() == options["live"]
