"""FP8 linears: the layer, its recipes, and the walk that converts a model."""

from fp8_ds.nn.convert import LayerPlan, Plan, apply_plan, make_plan
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.recipe import DelayedRecipe, Recipe, TensorwiseRecipe
from fp8_ds.nn.recipe_fine import BlockwiseRecipe, RowwiseGradWeightHpRecipe, RowwiseRecipe

__all__ = [
    "BlockwiseRecipe",
    "DelayedRecipe",
    "Fp8Linear",
    "LayerPlan",
    "Plan",
    "Recipe",
    "RowwiseGradWeightHpRecipe",
    "RowwiseRecipe",
    "TensorwiseRecipe",
    "apply_plan",
    "make_plan",
]
