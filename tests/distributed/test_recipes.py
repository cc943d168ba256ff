"""Scales of rows and tiles, and powers of two, under ZeRO: bytes are those of quantising whole masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.blockwise import quantize_blockwise
from fp8_ds.ops.quantize import quantize_rowwise

pytestmark = pytest.mark.distributed

# Tiles of 128 cut by rows, by columns, and by the edges of shards; two tiles each way.
MODEL = {"width": 140, "hidden": 150, "num_blocks": 1, "tiny": True}


def expected(linear: dict[str, Any], master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = linear["recipe"]
    if linear.get("weight_scales") == "power_of_two":
        amax = master.abs().amax(1, keepdim=True) if recipe == "rowwise" else master.abs().amax()
        scale = (E4M3.max / amax.double()).log2().floor().exp2().float()
        return (master * scale).to(E4M3.dtype).view(torch.uint8), scale.reciprocal()
    if recipe == "blockwise":
        quantized = quantize_blockwise(master, E4M3, (128, 128), "row")
        assert quantized.x_fp8 is not None and quantized.scale_inv is not None
        return quantized.x_fp8.view(torch.uint8), quantized.scale_inv
    data, scale_inv = quantize_rowwise(master, E4M3)
    return data.view(torch.uint8), scale_inv


def run(stage: int, accumulation: int, num_steps: int, fp8: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    engine = training.build(training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation), model)
    first, losses = training.fp8_state(engine), training.train(engine, num_steps)
    report = engine.fp8_report()
    result = {
        "first": first,
        "losses": losses,
        "last": training.fp8_state(engine),
        "masters": training.full_masters(engine),
        "gathered": report["gathered_fp8_bytes"],
        "weights": report["num_fp8_weights"],
        "num_amax_reduces": report["num_amax_reduces"],
    }
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "linear"),
    [
        pytest.param(2, {"recipe": "rowwise"}, marks=pytest.mark.slow),
        (3, {"recipe": "blockwise"}),
        pytest.param(2, {"recipe": "delayed", "weight_scales": "power_of_two"}, marks=pytest.mark.slow),
        (3, {"recipe": "rowwise", "weight_scales": "power_of_two"}),
    ],
    ids=["rows", "blocks", "powers of two", "powers of two of rows"],
)
def test_bytes_are_those_of_the_whole_master_on_any_number_of_ranks(
    ranks: Any, stage: int, linear: dict[str, Any]
) -> None:
    fp8 = {"linear": linear}
    one = ranks(1).run(run, stage, 3, 4, fp8, MODEL)[0]
    many = ranks(3).run(run, stage, 1, 4, fp8, MODEL)
    num_weights = sum(data.numel() for data, _ in many[0]["last"].values())
    for result in many:  # a byte a weight; a model of this size stays gathered in stage 3, too
        assert 1.0 <= result["gathered"] / num_weights <= 1.02
    for result in (one, *many):
        assert result["num_amax_reduces"] == 1
        training.assert_fp8_equals(
            result["last"], {name: expected(linear, result["masters"][name]) for name in result["last"]}
        )
    for result in many:
        training.assert_fp8_equals(result["first"], one["first"])
        training.assert_fp8_equals(result["last"], many[0]["last"])
        assert result["losses"] == many[0]["losses"] and result["losses"][-1] < result["losses"][0]
    assert max(abs(a - b) for a, b in zip(many[0]["losses"], one["losses"], strict=True)) < 0.05
    assert not torch.equal(next(iter(one["first"].values()))[0], next(iter(one["last"].values()))[0])


def losses_of(stage: int, fp8: dict[str, Any] | None) -> list[float]:
    engine = training.build(training.ds_config(stage, fp8), MODEL)
    if fp8 is not None:
        recipes = {module.fp8_recipe.name for module in engine.module.modules() if hasattr(module, "fp8_recipe")}
        assert recipes == {fp8["linear"]["recipe"]}
    losses = training.train(engine, 20)
    training.destroy(engine)
    return losses


@pytest.fixture(scope="module")
def stock(ranks: Any) -> list[float]:
    return ranks(2).run(losses_of, 2, None)[0]


@pytest.mark.parametrize(
    ("stage", "master", "recipe"),
    [
        (3, "e4m11", "tensorwise"),
        (2, "e4m11", "rowwise"),
        (2, "fp32", "rowwise_with_gw_hp"),
        (2, "e4m19", "blockwise"),
    ],
)
def test_every_recipe_trains_with_every_master_as_bf16_does(
    ranks: Any, stock: list[float], stage: int, master: str, recipe: str
) -> None:
    states = {} if master == "fp32" else {"optimizer": {"states": "fp8", "master": master}}
    ours = ranks(2).run(losses_of, stage, {"linear": {"recipe": recipe}, **states})[0]
    assert stock[-1] < 0.9 * stock[0]
    assert max(abs(a - b) / a for a, b in zip(stock, ours, strict=True)) < 0.05
