"""SwiGLU of experts' packed rows (nn/groups.py), straight into the FP8 that `down_proj` multiplies.

Shape suffixes: P rows, I intermediate features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.nn.fused import FORMAT, as_rows, deliver
from fp8_ds.nn.recipe import Recipe
from fp8_ds.once_differentiable import once_differentiable
from fp8_ds.ops.swiglu import swiglu, swiglu_backward_packed


class _PackedSwiglu(torch.autograd.Function):
    """`silu(gate) * up`, rounded where eager bf16 rounds; its gradient is that of both in one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, recipe: Recipe, record: bool) -> Tensor:
        scaling = recipe.producer_scaling()
        assert scaling is not None, "experts' recipes have one scale for all"
        gate_PI, up_PI = gate_up.chunk(2, dim=-1)
        output = swiglu(gate_PI, up_PI, FORMAT, scaling, record=record, rounding="twice", with_hp=True)
        if record:
            ctx.save_for_backward(gate_up)
        return deliver(output, recipe, scaling, gate_PI.shape, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PI: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward_packed(as_rows(grad_PI), gate_up, rounding="twice"), None, None


def packed_swiglu(gate_up: Tensor, recipe: Recipe) -> Tensor:
    """bf16 [P, I], which a product by `recipe` finds quantised.

    Args:
        gate_up: bf16 [P, 2 I], gate first.
        recipe: of `down_proj`, in FP8.
    """
    apply: Any = _PackedSwiglu.apply  # untyped in torch
    hidden: Tensor = apply(gate_up, recipe, torch.is_grad_enabled())
    return hidden
