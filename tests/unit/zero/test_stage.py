"""What is common to all stages: the context of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.config import Fp8Config
from fp8_ds.nn.linear.payload import ROW, TENSOR, TILE
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.zero.stage import Fp8Context


def context(weights: dict[str, Any], stored: dict[int, StoredScales] | None = None, **block: Any) -> Fp8Context:
    plan: Any = None
    return Fp8Context(
        Fp8Config.from_block({"enabled": True, "preset": None, **block}), plan, weights, stored=stored or {}
    )


def weight(trains: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 6), requires_grad=trains)


def test_a_weight_that_is_frozen_or_trained_later_is_what_it_was_at_the_start() -> None:
    first, second = weight(), weight(trains=False)
    found = context({"first": first, "second": second})
    first.requires_grad, second.requires_grad = False, True
    assert list(found.trainable) == ["first"] and list(found.frozen) == ["second"]


def test_frozen_weights_that_came_in_fp8_are_not_quantised_and_others_are() -> None:
    weights = {"trained": weight(), "frozen": weight(False), "kept": weight(False), "unfrozen": weight()}
    scales = StoredScales(torch.ones(4, 1), ROW, (4, 6), ())
    stored = {id(weights[name]): scales for name in ("kept", "unfrozen")}
    assert list(context(weights, stored).quantized) == ["trained", "frozen", "unfrozen"]


@pytest.mark.parametrize(
    ("recipe", "granularity"), [("tensorwise", TENSOR), ("rowwise", ROW), ("blockwise", TILE), ("delayed", TENSOR)]
)
def test_a_recipe_says_which_elements_share_a_scale(recipe: str, granularity: Any) -> None:
    assert context({}, linear={"recipe": recipe}).granularity.block == granularity.block


def test_first_scales_are_those_of_a_folder_if_they_follow_the_engines_rule() -> None:
    powers = torch.tensor([[2.0**-3], [2.0**-1], [1.0], [4.0]])
    grids = {"powers": powers, "others": 0.75 * powers, "same": torch.full((4, 1), 0.5), "none": None}
    params = [weight() for _ in grids]
    stored = {
        id(p): StoredScales(grid, ROW, (4, 6), ())
        for p, grid in zip(params, grids.values(), strict=True)
        if grid is not None
    }

    def first(**block: Any) -> dict[int, Any]:
        return {index: x.tolist() for index, x in context({}, stored, **block).first_scales(params).items()}

    exact = {"linear": {"recipe": "rowwise", "weight_scales": "power_of_two"}}
    assert first(**exact) == {0: powers.tolist(), 2: [[0.5]] * 4}
    assert list(first(linear={"recipe": "rowwise"})) == [1]
    assert first(optimizer={"states": "fp8"}) == {2: 0.5}  # one power of two for a whole weight
