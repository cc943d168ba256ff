"""FP8 linears: the layer, its recipes, and the walk that converts a model."""

from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.nn.linear.recipes import (
    BlockwiseRecipe,
    DelayedRecipe,
    RowwiseGradWeightHpRecipe,
    RowwiseRecipe,
    TensorwiseRecipe,
)
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import LayerPlan, Plan, make_plan

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
