"""A tensor-parallel SwiGLU MLP as one function: nn/fused/swiglu.py with a gather and a reduce-scatter each way.

Shape suffixes: S tokens of one rank, T = S n tokens of all n ranks, I the MLP's width, F that of a rank's product.

    forward   x [S, I] in FP8, gathered -> gate, up (bf16) -> their product, straight into FP8 -> addends of the output,
              reduce-scattered; under that, x's columns
    kept      x's columns in FP8; gate and up in bf16 or FP8
    backward  grad_output [S, I] in FP8, gathered; under that, the weights and the product, transposed -> gradient of
              the product (bf16) -> those of gate and up, straight into FP8 -> addends of grad_input, reduce-scattered;
              under that, the gradients of the weights of gate and up

Codes, scales and collectives are those of the three linears by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.nn.fused.module import Nonlinear, recover
from fp8_ds.nn.fused.swiglu import (
    NeedsGrad,
    Recipes,
    bias_grads,
    keep_factors,
    kept_product,
    product,
    split_kept,
    swiglu_grads,
)
from fp8_ds.nn.linear.fp8_linear import check_input, checked_weights, linear_grads, linear_output, read_weight
from fp8_ds.nn.linear.recipe import as_matrix
from fp8_ds.ops._register import once_differentiable
from fp8_ds.tp.context import TensorParallel, traced_where_possible
from fp8_ds.tp.regions import gather_shard, start_reduction
from fp8_ds.tp.rules import TensorRule


class _Rules(NamedTuple):
    """One rule for each of the three linears, equal in kind."""

    gate: TensorRule
    up: TensorRule
    down: TensorRule

    @property
    def recipes(self) -> Recipes:
        return Recipes(self.gate.recipe, self.up.recipe, self.down.recipe)


class _ParallelMlp(torch.autograd.Function):
    """The function of the module's docstring. Inputs: those of `NeedsGrad` but the last, and four without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        rules: _Rules,
        tp: TensorParallel,
        nonlinear: Nonlinear,
        record: bool,
    ) -> Tensor:
        gathered = gather_shard(rules.gate.send_input(x, record=record), tp)
        gate_fp8 = read_weight(gate_weight, rules.gate.recipe)
        gate_TF = rules.gate.output(gathered, gate_fp8, gate_bias, x.dtype)
        up_fp8 = read_weight(up_weight, rules.up.recipe)
        up_TF = rules.up.output(gathered, up_fp8, up_bias, x.dtype)
        down = rules.down.recipe
        _, product_fp8, amax = product(gate_TF, up_TF, down, with_hp=False, needs_columns=False, record=record)
        output = start_reduction(tp, linear_output(product_fp8, down_weight, None, down, x.dtype))
        # On ctx and not in save_for_backward, and no view as output: as in nn/linear/fp8_linear.py.
        ctx.weights = gate_weight, up_weight, down_weight
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias)]
        ctx.rules, ctx.tp, ctx.x_shape = rules, tp, x.shape
        keeps_x = record and (gate_weight.requires_grad or up_weight.requires_grad)
        kept_x = rules.gate.keep_input(gathered) if keeps_x else ()
        ctx.num_kept_x = len(kept_x)
        if record and any(ctx.needs_input_grad):
            wanted = NeedsGrad._make([*ctx.needs_input_grad[:6], False])
            pairs = (gate_weight, wanted.x), (up_weight, wanted.x), (down_weight, wanted.product)
            checked = checked_weights(*pairs)
            ctx.num_checked = len(checked)
            ctx.save_for_backward(*checked, *kept_x, *keep_factors(gate_TF, up_TF, nonlinear, amax))
        own_SI = output()
        return torch.ops.aten._unsafe_view.default(own_SI, (1, *own_SI.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        wanted = NeedsGrad._make([*ctx.needs_input_grad[:6], False])
        rules: _Rules = ctx.rules
        gate_weight, up_weight, down_weight = ctx.weights
        dtype = grad_output.dtype
        gathered = gather_shard(rules.down.send_grad(as_matrix(grad_output)), ctx.tp)
        # Until it is there: what the GEMMs read beside it.
        kept_x, gate, up, amax = split_kept(ctx.saved_tensors[ctx.num_checked :], ctx.num_kept_x)
        gate_TF, up_TF = recover(gate), recover(up)
        down_fp8 = rules.down.prepared(read_weight(down_weight, rules.down.recipe)) if wanted.product else None
        weights_fp8 = [
            rule.prepared(read_weight(weight, rule.recipe))
            for rule, weight in ((rules.gate, gate_weight), (rules.up, up_weight))
            if wanted.x
        ]
        product_TF: Any = kept_product(gate_TF, up_TF, rules.down.recipe, amax) if wanted.down else None
        grad_product, down_grad = rules.down.grads(gathered, down_fp8, product_TF, (dtype, down_weight.dtype))
        if grad_product is None:
            return None, None, None, down_grad, None, None, None, None, None, None
        grads, hps = swiglu_grads(grad_product, gate_TF, up_TF, rules.recipes, wanted)
        del grad_product, gate_TF, up_TF, product_TF, down_fp8, gathered
        grad_x = None
        if wanted.x:
            grads_fp8: Any = grads  # where x's gradient is wanted
            from_gate, from_up = (
                rule.recipe.grad_input(grad, weight_fp8, dtype)
                for rule, grad, weight_fp8 in zip((rules.gate, rules.up), grads_fp8, weights_fp8, strict=True)
            )
            grad_x = start_reduction(ctx.tp, from_gate.add_(from_up))
        gate_grad, up_grad = (
            linear_grads(grad, weight, rule.recipe, kept_x if is_wanted else None, needs_input=False, dtype=dtype)[1]
            for grad, weight, rule, is_wanted in (
                (grads[0], gate_weight, rules.gate, wanted.gate),
                (grads[1], up_weight, rules.up, wanted.up),
            )
        )
        gate_bias, up_bias = bias_grads(hps, ctx.bias_dtypes, wanted)
        own = None if grad_x is None else grad_x().view(ctx.x_shape)
        return own, gate_grad, up_grad, down_grad, gate_bias, up_bias, None, None, None, None


@traced_where_possible
def _apply(x: Tensor, tp: TensorParallel, linears: Sequence[Any], nonlinear: Nonlinear) -> Tensor:
    gate, up, down = linears
    tp.check_first(x, is_full=False)
    rules = _Rules(gate.tp_rule, up.tp_rule, down.tp_rule)
    weights = gate.weight, up.weight, down.weight
    output: Tensor = _ParallelMlp.apply(x, *weights, gate.bias, up.bias, rules, tp, nonlinear, torch.is_grad_enabled())
    return output if down.bias is None else output + down.bias.to(output.dtype)


def parallel_mlp(x: Tensor, linears: Sequence[Any], nonlinear: Nonlinear) -> Tensor:
    """Compute as `swiglu_mlp` from this rank's tokens, bf16 [..., I], its tokens of the output, bf16 [1, S, I], by
    linears for which `ColumnParallelFp8Linear.mlp_function` returns this function. Collective."""
    check_input(x, linears[0].weight)
    return _apply(x, linears[0].tp, linears, nonlinear)
