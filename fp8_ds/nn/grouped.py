"""One product of all experts of a layer: each expert's weight by the tokens that chose it.

Shape suffixes: T tokens, k experts that each of them chose, E experts, P rows (nn/groups.py), N output and K input
features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.nn.expert_products import expert_products
from fp8_ds.nn.groups import Groups
from fp8_ds.nn.linear import checked_weights
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe
from fp8_ds.once_differentiable import once_differentiable


class _GroupedFunction(torch.autograd.Function):
    """y = x W^T of each expert; kept for backward is x in FP8, of each token once, and its scale_inv."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, is_spread: bool, record: bool
    ) -> Tensor:
        x_fp8 = recipe.quantize_input(x, needs_columns=False, record=record)
        assert x_fp8.rows is not None
        # On ctx, as nn/linear.py has it.
        ctx.recipe, ctx.is_spread = recipe, is_spread
        ctx.weight_dtype = weight.dtype
        weight_fp8 = recipe.read_weight(weight)
        # A sum with an adapter is no Parameter, which outlives the graph: on ctx it would be kept past a checkpoint.
        ctx.weight = weight if isinstance(weight, nn.Parameter) else None
        kept = (x_fp8.rows, x_fp8.scale_inv) if record and weight.requires_grad else (None, None)
        recipe.count_whole(x_fp8, weight_fp8)
        rows_PK = x_fp8.rows if is_spread else groups.spread(x_fp8.rows)
        products = expert_products(groups, recipe)
        output = products.output(rows_PK, x_fp8.scale_inv, weight_fp8, x.dtype)
        ctx.num_choices = groups.num_choices
        if record:
            # Which rows are whose, too: on ctx it would be held through a checkpoint, and a backward would go by it
            # where the rows are those of a forward that was done again, whose router may have chosen otherwise.
            whose = products.kept_groups()
            checked = checked_weights((weight, ctx.needs_input_grad[0]))
            ctx.num_checked = len(checked)
            ctx.save_for_backward(*checked, *whose, *kept, *(weight_fp8 if ctx.weight is None else (None, None)))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        recipe = ctx.recipe
        ends, place, order, *kept, data, scale_inv = ctx.saved_tensors[ctx.num_checked :]
        groups = Groups(ends, place, order, ctx.num_choices)
        weight_fp8 = recipe.read_weight(ctx.weight) if data is None else Fp8Weight(data, scale_inv)
        grad_PN = grad_PN.contiguous()
        grad_fp8 = recipe.quantize_grad_output(grad_PN, weight_fp8, None)
        rows_PN = recipe.grad_rows(grad_fp8)
        products, grad_x, grad_weight = expert_products(groups, recipe), None, None
        if needs_input:
            grad_x = products.grad_input(rows_PN, grad_fp8.scale_inv, weight_fp8, grad_PN.dtype)
            if not ctx.is_spread:
                grad_x = groups.add_up(grad_x)
        if needs_weight:
            x, x_scale_inv = kept
            rows_PK = x if ctx.is_spread else groups.spread(x)
            whole = Quantized(rows_PN, None, grad_fp8.scale_inv)
            grad_weight = products.grad_weight(whole, grad_PN, rows_PK, x_scale_inv, ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, *, is_spread: bool) -> Tensor:
    """Of each expert `x W^T`, [P, N]; zeros in the rows that are nobody's.

    One amax and one cast of `x`, and one of its gradient, for all experts, whose weights have one scale.

    Args:
        x: bf16, fp16 or fp32: [T, K], each token once, or [P, K], spread.
        weight: [E, N, K], see `nn.linear.read_weight`. Its gradient is 0 for experts without tokens.
        groups: of the T tokens.
        recipe: of this weight; it has one scale a tensor.
        is_spread: whether `x` is [P, K].
    """
    apply: Any = _GroupedFunction.apply  # untyped in torch
    output: Tensor = apply(x, weight, groups, recipe, is_spread, torch.is_grad_enabled())
    return output
