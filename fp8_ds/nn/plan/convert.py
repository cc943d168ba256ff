"""Application of a plan: layers become FP8 in place, or bf16 again; the FP8 layers of a converted model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.fused.search import linears_that_read
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import InputCache, Recipe
from fp8_ds.nn.linear.recipes import RECIPES, Bf16Recipe, DelayedRecipe
from fp8_ds.nn.linear.stored import RECIPE_OF
from fp8_ds.nn.moe.experts import ExpertsWeight, Fp8Experts
from fp8_ds.nn.moe.stored import scales_of
from fp8_ds.nn.plan.plan import ForeignLinears, LayerPlan, Plan, fp8_class_of
from fp8_ds.numerics.formats import BY_NAME, E4M3
from fp8_ds.numerics.scale import AmaxHistory

INPUT_SLOTS = slice(0, None, 2)
"""Slots of the inputs in the amax history of `apply_plan`; the others are of grad_outputs."""


Fp8Layer: TypeAlias = Fp8Linear | ExpertsWeight


def fp8_layers(model: nn.Module) -> dict[str, Fp8Layer]:
    """Return FP8 layers by plan name, in module order: linears by module name, experts' weights by parameter name."""
    found: dict[str, Fp8Layer] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            found[fqn] = module
        elif isinstance(module, Fp8Experts):
            prefix = f"{fqn}." if fqn else ""
            found.update((prefix + name, ExpertsWeight(module, name)) for name in module.fp8_recipes)
    return found


def apply_plan(
    model: nn.Module,
    plan: Plan,
    linear_config: LinearConfig,
    device: torch.device | str,
    foreign: ForeignLinears = MappingProxyType({}),
) -> AmaxHistory | None:
    """Convert the plan's FP8 layers in place, each to an Fp8Linear or a weight of Fp8Experts.

    The rest of the model is untouched.

    Args:
        model, linear_config, foreign: as given to `make_plan`.
        plan: from `make_plan`, for this model as it is.
        device: where the amax history lives, the device of training.

    Returns:
        The amax history for recipe "delayed": slot 2 i for the i-th converted layer's input, 2 i + 1 for its
        grad_output; nothing enters those of a layer with the scales of an FP8 folder. None for the other recipes.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    rows = [layer for layer in plan.layers if layer.converted]
    converters = [_converter(modules, layer, foreign) for layer in rows]
    caches: dict[str, InputCache] = {linear_config.recipe: InputCache()}
    own = [_recipe_of_stored(modules, layer, linear_config, caches) for layer in rows]
    input_cache = caches[linear_config.recipe]
    if linear_config.recipe != "delayed":
        for convert, stored in zip(converters, own, strict=True):
            convert(stored or RECIPES[linear_config.recipe](linear_config, input_cache))
        return None
    fp8_max = [E4M3.max, BY_NAME[linear_config.grad_dtype].max] * len(converters)
    names = [f"{layer.fqn} {kind}" for layer in plan.layers if layer.converted for kind in ("input", "grad_output")]
    history = AmaxHistory(len(fp8_max), fp8_max, device=device, names=names)
    for i, (convert, stored) in enumerate(zip(converters, own, strict=True)):
        convert(stored or DelayedRecipe(linear_config, history, 2 * i, 2 * i + 1, input_cache))
    set_leaders(model)
    return history


def _recipe_of_stored(
    modules: Mapping[str, Any], layer: LayerPlan, config: LinearConfig, caches: dict[str, InputCache]
) -> Recipe | None:
    """Return the recipe by which a frozen layer computes with the scales of its FP8 folder; None: it has none.

    Args:
        caches: by recipe: layers that read one input quantise it once if their recipes are the same.
    """
    owner, _, weight_name = layer.weight_name.rpartition(".")
    stored = scales_of(modules[owner], weight_name)
    if stored is None or modules[owner]._parameters[weight_name].requires_grad:
        return None
    name = RECIPE_OF[stored.granularity]
    if name != config.recipe:
        fixed = {"grad_dtype": "e4m3", "fast_accumulation": "none"} if name == "blockwise" else {}
        config = config.model_copy(update={"recipe": name, **fixed})
    recipe = RECIPES[name](config, caches.setdefault(name, InputCache()))
    recipe.is_stored = True
    return recipe


def change_recipes(model: nn.Module, linear_config: LinearConfig, history: AmaxHistory | None) -> None:
    """Give the FP8 layers of a model that `apply_plan` has converted recipes anew, before their next forward.

    Layers with the scales of an FP8 folder keep theirs.

    Args:
        linear_config: with the present recipe, or with one that has one scale for a weight, as the present one.
        history: returned by `apply_plan`. The recipe "tensorwise" leaves it as it is.
    """
    input_cache = InputCache()
    if history is not None:
        history.fp8_max[1::2] = BY_NAME[linear_config.grad_dtype].max
    for fqn, layer in fp8_layers(model).items():
        old = layer.fp8_recipe
        if old.is_stored:
            continue
        new: Recipe
        if linear_config.recipe == "delayed":
            assert history is not None, "a run without amax histories has scales of the tensor at hand, to its end"
            slot_x, slot_grad = (history.names.index(f"{fqn} {kind}") for kind in ("input", "grad_output"))
            new = DelayedRecipe(linear_config, history, slot_x, slot_grad, input_cache)
        else:
            new = RECIPES[linear_config.recipe](linear_config, input_cache)
        new.weight_is_transposed = old.weight_is_transposed
        layer.fp8_recipe = new
    set_leaders(model)


def _converter(modules: Mapping[str, Any], layer: LayerPlan, foreign: ForeignLinears) -> Callable[[Recipe], object]:
    """Return the function that puts `layer` into FP8, given its recipe."""
    owner, _, name = layer.weight_name.rpartition(".")
    if layer.num_experts:
        return partial(Fp8Experts.convert_weight, modules[owner], name)
    fp8_class = fp8_class_of(modules[owner], foreign)
    assert fp8_class is not None, f"{layer.fqn} is converted already, or the plan is of another model"
    return partial(fp8_class.from_linear, modules[owner])


def set_leaders(model: nn.Module) -> None:
    """Give layers with delayed scales that read one module's output the first of them as `leader`, others none.

    Layers that record no amaxes, in bf16 for good, lead nobody.
    """
    all_delayed = list(filter(None, (_recorded(layer.fp8_recipe) for layer in fp8_layers(model).values())))
    for recipe in all_delayed:
        recipe.leader = None
    if not all_delayed:
        return
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is None or isinstance(child, nn.Linear):
                continue
            readers = [one.fp8_recipe for one in linears_that_read(parent, name) if isinstance(one, Fp8Linear)]
            delayed = list(filter(None, map(_recorded, readers)))
            if len(delayed) > 1:
                for recipe in delayed:
                    recipe.leader = delayed[0].slot_x


def _recorded(recipe: Recipe) -> DelayedRecipe | None:
    """Return the recipe whose amaxes a layer with `recipe` records; None: it records none."""
    if isinstance(recipe, Bf16Recipe):
        return recipe.recorded
    return recipe if isinstance(recipe, DelayedRecipe) else None


def revert(model: nn.Module, plan: Plan, fqns: Collection[str], reason: str) -> Plan:
    """Make the layers `fqns` nn.Linear again, or experts in bf16, with the same Parameters, before training.

    Returns:
        The applied plan with these layers in bf16 for that reason."""
    layers = fp8_layers(model)
    for fqn in fqns:
        layers[fqn].revert()
    set_leaders(model)  # none whose amax nobody records any more
    rows = (replace(row, converted=False, reason=reason) if row.fqn in fqns else row for row in plan.layers)
    return replace(plan, layers=tuple(rows))
