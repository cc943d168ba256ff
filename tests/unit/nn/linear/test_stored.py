"""Scales beside FP8 weights: which are known, and how codes times scales are restored from what bf16 has rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.payload import ROW, TILE
from fp8_ds.nn.linear.recipes import BlockwiseRecipe, RowwiseRecipe, TensorwiseRecipe
from fp8_ds.nn.linear.stored import StoredScales, is_stored, stored_scales
from fp8_ds.nn.plan.convert import apply_plan, change_recipes
from fp8_ds.nn.plan.plan import make_plan

FP8 = torch.float8_e4m3fn
SHAPE = (200, 300)
CODES = torch.arange(256, dtype=torch.uint8).view(FP8)
CODES = CODES[CODES.float().isfinite()]


def all_codes() -> Tensor:
    return CODES.view(torch.uint8).repeat(-(-SHAPE[0] * SHAPE[1] // len(CODES)))[: SHAPE[0] * SHAPE[1]].view(FP8)


def scales_of(kind: str, smallest: int = -90, largest: int = 90) -> tuple[Tensor, Any]:
    grid, granularity = ((2, 3), TILE) if kind == "blocks" else ((SHAPE[0], 1), ROW)
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(smallest, largest, grid, generator=generator).float())
    return scale * (1 + torch.rand(grid, generator=generator)), granularity


def expected(codes: Tensor, scale: Tensor) -> Tensor:
    row, col = torch.arange(SHAPE[0])[:, None], torch.arange(SHAPE[1])[None]
    return codes.view(SHAPE).float() * (scale[row, 0] if scale.shape[1] == 1 else scale[row // 128, col // 128])


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("cut", [0, 1, 299, 40_000, 59_999])
def test_what_bf16_has_rounded_is_restored_bit_for_bit_from_any_element_on(
    kind: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All codes, at scales of very different sizes; shards begin and end within rows and blocks."""
    monkeypatch.setattr("fp8_ds.nn.linear.stored._CHUNK", 7001)
    scale, granularity = scales_of(kind)
    stored, codes = StoredScales(scale, granularity, SHAPE, ()), all_codes()
    exact = expected(codes, scale).view(-1)
    rounded = stored.dequantize(codes.view(SHAPE), torch.bfloat16).view(-1)
    assert torch.equal(rounded, exact.bfloat16()) and not torch.equal(rounded.float(), exact)
    for part in (slice(0, cut), slice(cut, None)):
        values = rounded[part].float()
        stored.restore_(values, part.start)
        assert torch.equal(values.view(torch.int32), exact[part].view(torch.int32))
        values = codes[part].float()
        stored.multiply_(values, part.start)
        assert torch.equal(values.view(torch.int32), exact[part].view(torch.int32))


def test_a_scale_of_zero_makes_zeros() -> None:
    scale, granularity = scales_of("blocks")
    scale[1, 2] = 0.0
    stored, codes = StoredScales(scale, granularity, SHAPE, ()), all_codes()
    values = stored.dequantize(codes.view(SHAPE), torch.bfloat16).float().view(-1)
    stored.restore_(values, 0)
    assert torch.equal(values.view(SHAPE), expected(codes, scale)) and not values.view(SHAPE)[128:, 256:].any()
    assert stored.scale[1, 2] == 1.0


def linear(name: str, scale: Tensor | None, dtype: torch.dtype = FP8) -> nn.Linear:
    module: Any = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    module.weight = nn.Parameter(torch.ones(SHAPE).to(dtype), requires_grad=False)
    if scale is not None:
        module.register_parameter(name, nn.Parameter(scale, requires_grad=False))
    found: nn.Linear = module
    return found


@pytest.mark.parametrize(
    ("module", "granularity"),
    [
        (linear("weight_scale_inv", torch.ones(2, 3)), TILE),
        (linear("weight_scale", torch.ones(200, 1, dtype=torch.bfloat16)), ROW),
        (linear("weight_scale_inv", torch.ones(2, 3).to(torch.float8_e8m0fnu)), TILE),
        (linear("weight_scale", torch.ones(1)), None),
        (linear("weight_scale_inv", torch.ones(3, 2)), None),
        (linear("scale", torch.ones(2, 3)), None),
        (linear("weight_scale", torch.ones(200, 1), torch.bfloat16), None),
        (linear("", None), None),
    ],
)
def test_scales_are_known_by_their_shape(module: nn.Module, granularity: Any) -> None:
    found = stored_scales(module)
    assert (None if found is None else found.granularity) == granularity
    if found is not None:
        assert found.scale_inv.dtype == torch.float32 and bool((found.scale_inv == 1).all()) and is_stored(module)


def test_exponents_in_bytes_are_powers_of_two() -> None:
    exponents = torch.tensor([[120, 127, 130], [1, 100, 119]], dtype=torch.uint8)
    module = linear("weight_scale_inv", None)
    module._parameters["weight_scale_inv"] = nn.Parameter(exponents, requires_grad=False)
    found = stored_scales(module)
    assert found is not None and torch.equal(found.scale_inv, torch.exp2(exponents.double() - 127).float())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_frozen_stored_layer_has_the_recipe_of_its_scales_for_good(recipe: str) -> None:
    scale, _ = scales_of("blocks")
    model = nn.ModuleDict(
        {"blocks": linear("weight_scale_inv", scale), "rows": linear("weight_scale", scales_of("rows")[0])}
    )
    model["own"] = nn.Linear(300, 200)
    model["trains"] = linear("weight_scale_inv", scale).requires_grad_()
    config = LinearConfig(recipe=recipe, frozen="fp8")
    plan = make_plan(model, config)
    assert plan.num_converted == 4 and make_plan(model, LinearConfig(recipe=recipe)).num_converted == 2
    history = apply_plan(model, plan, config, "cpu")
    recipes: dict[str, Any] = {name: layer.fp8_recipe for name, layer in model.items()}
    assert type(recipes["blocks"]) is BlockwiseRecipe and type(recipes["rows"]) is RowwiseRecipe
    assert recipes["own"].name == recipes["trains"].name == recipe
    assert recipes["blocks"].grad_format.name == "e4m3" and not recipes["blocks"].fast_gemms
    assert (recipes["blocks"].input_cache is recipes["own"].input_cache) == (recipe == "blockwise")
    assert recipes["rows"].input_cache not in (recipes["blocks"].input_cache, recipes["own"].input_cache)
    if recipe == "blockwise":
        return
    change_recipes(model, LinearConfig(recipe="tensorwise", frozen="fp8"), history)
    now: dict[str, Any] = {name: layer.fp8_recipe for name, layer in model.items()}
    assert now["blocks"] is recipes["blocks"] and now["rows"] is recipes["rows"]
    assert type(now["own"]) is type(now["trains"]) is TensorwiseRecipe and now["own"] is not recipes["own"]
