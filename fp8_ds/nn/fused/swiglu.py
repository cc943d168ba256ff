"""A SwiGLU MLP, `down(silu(gate(x)) * up(x))`, as one autograd function: what is FP8 in it and what is kept.

Shape suffixes: T tokens (all leading dims), I the MLP's width, F that of its product.

    forward     x in FP8, once -> gate, up (bf16) -> their product, straight into FP8 -> output
    kept        x's columns in FP8; gate and up in bf16 or FP8; not the product
    backward    grad_output in FP8, once -> gradient of the product (bf16) -> those of gate and up, straight into FP8
                where their scale does not hang on the weights; else bf16, quantised by the recipe

The product's columns, which the gradient of `down`'s weight contracts, are made again from gate and up: the bytes of
the forward where these are kept in bf16 (and, delayed, no update of the history lies in between), those of the values
that came back where they are kept in FP8. Where every scale is one for a tensor, one op makes them beside the gradients
of gate and up, in one read; kept in FP8, by an op for each: in a graph the product's gradient is gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fp8_ds.nn.fused.module import FORMAT, Nonlinear, keep, recover
from fp8_ds.nn.linear.fp8_linear import Fp8Linear, bias_grad, check_input, checked_weights, linear_grads, linear_output
from fp8_ds.nn.linear.recipe import Kept, Quantized, Recipe, as_matrix
from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops._producer import Fp8Output, Scaling
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_and_columns,
    swiglu_backward_kept,
    swiglu_backward_to_fp8,
    swiglu_columns,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Recipes(NamedTuple):
    """One recipe for each of the three linears, equal in kind."""

    gate: Recipe
    up: Recipe
    down: Recipe


class NeedsGrad(NamedTuple):
    """Gradients that autograd asks for, as flags in the order of the function's first inputs."""

    x: bool
    gate: bool
    up: bool
    down: bool
    gate_bias: bool
    up_bias: bool
    down_bias: bool

    @property
    def product(self) -> bool:
        return self.x or self.gate or self.up or self.gate_bias or self.up_bias

    @property
    def both_factors(self) -> bool:
        """Whether a GEMM reads the gradient of gate, and one that of up."""
        return self.x or (self.gate and self.up)


class _MlpFunction(torch.autograd.Function):
    """The function of the module's docstring. Its inputs are those of `NeedsGrad`, and three that have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        recipes: Recipes,
        nonlinear: Nonlinear,
        record: bool,
    ) -> Tensor:
        keeps_x = record and (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        x_fp8 = recipes.gate.quantize_input(x, needs_columns=keeps_x, record=record)
        up_x_fp8 = recipes.up.adopt(x, x_fp8, record=record)
        gate_TF = linear_output(x_fp8, gate_weight, gate_bias, recipes.gate, x.dtype)
        up_TF = linear_output(up_x_fp8, up_weight, up_bias, recipes.up, x.dtype)
        _, product_fp8, amax = product(gate_TF, up_TF, recipes.down, with_hp=False, needs_columns=False, record=record)
        output_TI = linear_output(product_fp8, down_weight, down_bias, recipes.down, x.dtype)
        # On ctx and not in save_for_backward, and no view as output: as in nn/linear/fp8_linear.py.
        ctx.weights = gate_weight, up_weight, down_weight
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias, down_bias)]
        ctx.recipes, ctx.x_shape = recipes, x.shape
        kept_x = recipes.gate.kept(x, x_fp8) if keeps_x else ()
        ctx.num_kept_x = len(kept_x)
        if record and any(ctx.needs_input_grad):
            wanted = NeedsGrad(*ctx.needs_input_grad[:7])
            pairs = (gate_weight, wanted.x), (up_weight, wanted.x), (down_weight, wanted.product)
            checked = checked_weights(*pairs)
            ctx.num_checked = len(checked)
            ctx.save_for_backward(*checked, *kept_x, *keep_factors(gate_TF, up_TF, nonlinear, amax))
        output: Tensor = torch.ops.aten._unsafe_view(output_TI, (*x.shape[:-1], output_TI.shape[-1]))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        wanted = NeedsGrad(*ctx.needs_input_grad[:7])
        recipes: Recipes = ctx.recipes
        kept_x, gate, up, amax = split_kept(ctx.saved_tensors[ctx.num_checked :], ctx.num_kept_x)
        grad_TI = as_matrix(grad_output)
        down_bias = bias_grad(grad_TI, ctx.bias_dtypes[2]) if wanted.down_bias else None
        down_weight, dtype = ctx.weights[2], grad_output.dtype
        scalings = scalings_of_one_op(recipes, wanted)
        hps: tuple[Tensor | None, Tensor | None] = (None, None)
        if scalings is not None:
            op = _FromKept(gate, up, amax, recipes, scalings)
            down_grad = linear_grads(grad_TI, down_weight, recipes.down, op, needs_input=True, dtype=dtype)[1]
            grads = op.grads
        else:
            gate_TF, up_TF = recover(gate), recover(up)
            kept = kept_product(gate_TF, up_TF, recipes.down, amax) if wanted.down else None
            grad_product, down_grad = linear_grads(
                grad_TI, down_weight, recipes.down, kept, needs_input=wanted.product, dtype=dtype
            )
            if grad_product is None:
                return None, None, None, down_grad, None, None, down_bias, None, None, None
            grads, hps = swiglu_grads(grad_product, gate_TF, up_TF, recipes, wanted)
            del grad_product, gate_TF, up_TF
        gate_bias, up_bias = bias_grads(hps, ctx.bias_dtypes, wanted)
        first = _linear_grads(grads, kept_x, ctx, wanted, grad_output.dtype)
        return *first, down_grad, gate_bias, up_bias, down_bias, None, None, None


def product(
    gate: Tensor, up: Tensor, recipe: Recipe, *, with_hp: bool, needs_columns: bool, record: bool
) -> tuple[Tensor | None, Quantized, Tensor | None]:
    """Return `silu(gate) * up` as (bf16 [T, F] if asked for or needed on the way, FP8 for `down`, its amax if known).

    Args:
        gate, up: bf16 [T, F].
        recipe: of `down`.
        with_hp, needs_columns: what is wanted beside the rows in FP8.
        record: whether this is a training forward. False in the backward, which repeats it: the repetition is then
            another op than the first in a graph as well, where equal ones become one whose output is kept.
    """
    scaling = recipe.scaling_without_hp()
    with_hp = with_hp or scaling is None
    output, amax = swiglu(gate, up, FORMAT, scaling or "rowwise", record=record, with_hp=with_hp)
    if scaling is None:
        assert output.hp is not None
        return output.hp, recipe.quantize_input(output.hp, needs_columns=needs_columns, record=record), None
    product_fp8 = _rows(output, scaling)
    return output.hp, product_fp8.with_columns() if needs_columns else product_fp8, amax


def kept_product(gate: Tensor, up: Tensor, recipe: Recipe, amax: Tensor | None) -> Kept:
    """Make again what `recipe.kept` would give for the product; `amax` as `split_kept` gives it."""
    takes_fp8 = recipe.needs_grad_columns
    scaling = recipe.scaling_without_hp()
    if takes_fp8 and scaling is not None and scaling != "rowwise":
        columns, scale_inv = swiglu_columns(gate, up, FORMAT, scaling, amax=amax)
        return recipe.kept(gate, Quantized(None, columns, scale_inv))
    hp, product_fp8, _ = product(gate, up, recipe, with_hp=not takes_fp8, needs_columns=takes_fp8, record=False)
    return recipe.kept(gate if hp is None else hp, product_fp8)


def keep_factors(gate: Tensor, up: Tensor, nonlinear: Nonlinear, amax: Tensor | None) -> Kept:
    """Return gate and up as saved for backward, and their product's amax if what is saved still has that one."""
    known = () if amax is None or nonlinear != "bf16" else (amax,)
    return *keep(gate, nonlinear), *keep(up, nonlinear), *known


def split_kept(saved: Kept, num_x: int) -> tuple[Kept, Kept, Kept, Tensor | None]:
    """Return (x as `Recipe.kept` gave it, gate and up as `keep` did, the amax of their product if it is known)."""
    factors = saved[num_x:]
    amax = factors[-1] if len(factors) % 2 else None
    half = len(factors) // 2
    return saved[:num_x], factors[:half], factors[half : 2 * half], amax


_Grad = Tensor | Quantized
"""bf16 [T, F], or its rows in FP8."""
_Scalings = tuple[AmaxSlot | Literal["tensorwise"], Scaling, Scaling]


def scalings_of_one_op(recipes: Recipes, wanted: NeedsGrad) -> _Scalings | None:
    """Return scalings of product, gate's and up's gradients if all are wanted with one scale (see `_FromKept`)."""
    if not (wanted.down and wanted.both_factors) or wanted.gate_bias or wanted.up_bias:
        return None
    if not all(recipe.needs_grad_columns for recipe in recipes):
        return None
    scalings: Any = recipes.down.scaling_without_hp(), recipes.gate.grad_scaling(), recipes.up.grad_scaling()
    has_slots = all(isinstance(one, AmaxSlot) for one in scalings)
    return scalings if has_slots or all(isinstance(one, str) and one == "tensorwise" for one in scalings) else None


class _FromKept:
    """Function for `linear_grads` of `down` that makes what its weight's gradient reads of the product, from the
    product's gradient, in one op with the gradients of gate and of up."""

    grads: tuple[_Grad, _Grad]

    def __init__(self, gate: Kept, up: Kept, amax: Tensor | None, recipes: Recipes, scalings: _Scalings) -> None:
        self.factors: Any = gate, up
        self.amax, self.recipes, self.scalings = amax, recipes, scalings

    def __call__(self, grad_product: Tensor | None) -> Kept:
        assert grad_product is not None
        fmt, scalings = self.recipes.gate.grad_format, self.scalings
        gate, up = self.factors
        if len(gate) == 1:  # outputs of our own products, contiguous
            columns, scale_inv, *grads = swiglu_backward_and_columns(
                grad_product, gate[0], up[0], (FORMAT, fmt), scalings, amax=self.amax
            )
        else:
            *grads, amax = swiglu_backward_kept(grad_product, gate, up, fmt, scalings[1:])
            columns, scale_inv = swiglu_columns(gate, up, FORMAT, scalings[0], amax=amax)
        self.grads = _rows(grads[0], scalings[1]), _rows(grads[1], scalings[2])
        return self.recipes.down.kept(grad_product, Quantized(None, columns, scale_inv))


def swiglu_grads(
    grad: Tensor, gate: Tensor, up: Tensor, recipes: Recipes, wanted: NeedsGrad
) -> tuple[tuple[_Grad, _Grad], tuple[Tensor | None, Tensor | None]]:
    """Return gradients of gate and of up: (as their linears take them, in bf16 where a bias or a recipe needs it).

    Amaxes are recorded of those that are quantised: a gradient that no GEMM reads is not.
    """
    scales: Any = recipes.gate.grad_scaling(), recipes.up.grad_scaling()
    if None in scales or not wanted.both_factors:
        grads = swiglu_backward(grad, gate, up)
        return grads, grads
    with_hp = wanted.gate_bias or wanted.up_bias
    outputs = swiglu_backward_to_fp8(grad, gate, up, recipes.gate.grad_format, scales, with_hp=with_hp)
    gate_fp8, up_fp8 = (_rows(output, one) for output, one in zip(outputs, scales, strict=True))
    return (gate_fp8, up_fp8), (outputs[0].hp, outputs[1].hp)


def _linear_grads(
    grads: tuple[_Grad, _Grad], kept_x: Kept, ctx: Any, wanted: NeedsGrad, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, in its shape, and of the weights of gate and up."""
    from_gate, gate_grad = linear_grads(
        grads[0], ctx.weights[0], ctx.recipes.gate, kept_x if wanted.gate else None, needs_input=wanted.x, dtype=dtype
    )
    from_up, up_grad = linear_grads(
        grads[1], ctx.weights[1], ctx.recipes.up, kept_x if wanted.up else None, needs_input=wanted.x, dtype=dtype
    )
    grad_x = None if from_gate is None or from_up is None else from_gate.add_(from_up).view(ctx.x_shape)
    return grad_x, gate_grad, up_grad


def bias_grads(hps: tuple[Tensor | None, Tensor | None], dtypes: Any, wanted: NeedsGrad) -> list[Tensor | None]:
    """Compute the gradients of gate's and up's biases."""
    wants = wanted.gate_bias, wanted.up_bias
    return [
        bias_grad(hp, dtype) if is_wanted and hp is not None else None
        for hp, dtype, is_wanted in zip(hps, dtypes, wants, strict=False)
    ]


def _rows(output: Fp8Output, scaling: Any) -> Quantized:
    """Return a producer's FP8, made by that scaling."""
    return Quantized(output.x_fp8, None, output.scale_inv, slot=scaling if isinstance(scaling, AmaxSlot) else None)


def is_one_function(linears: Sequence[Any]) -> bool:
    """Whether calling these is no more than computing with their weights, in FP8 and by one kind of recipe.

    This is not so with a hook on any of them (ZeRO-3 has its own on every module that is not inside a leaf), with a
    replaced forward, with a weight that is partitioned now, and if one is in bf16, or all are for good.
    """
    if any(type(linear) is not Fp8Linear for linear in linears) or not _are_plain(linears):
        return False
    recipes = [linear.fp8_recipe for linear in linears]
    kinds = {(type(recipe), recipe.grad_format, recipe.backend) for recipe in recipes}
    return len(kinds) == 1 and not any(recipe.is_plain for recipe in recipes)


def function_of_sharded(linears: Sequence[Any]) -> Callable[..., Tensor] | None:
    """Return the function that computes TP-sharded linears at once; None if modules do more, see `is_one_function`."""
    find = getattr(type(linears[0]), "mlp_function", None)
    return None if find is None or not _are_plain(linears) else find(linears)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def calls_more() -> bool:
    """Whether calling any module is more than its own hooks and forward: all modules have hooks, somebody has replaced
    the call, or torch.jit traces it. A graph keeps the answer of the time when it was made, as torch does of hooks."""
    is_traced = torch._C._get_tracing_state() is not None
    is_called_otherwise = nn.Module.__call__ is not nn.Module._wrapped_call_impl
    return bool(_has_any_global_hook()) or is_called_otherwise or is_traced


def _are_plain(linears: Sequence[Any]) -> bool:
    """Whether calling them computes with their weights, which are here, and nothing else."""
    if calls_more():
        return False
    for linear in linears:
        own = vars(linear)
        if "forward" in own or any(own[kind] for kind in _HOOKS):
            return False
    with torch._C.DisableTorchFunctionSubclass():  # a weight's, which would be asked for each shape
        return all(linear.weight.shape == (linear.out_features, linear.in_features) for linear in linears)


def swiglu_mlp(x: Tensor, linears: Sequence[Any], nonlinear: Nonlinear) -> Tensor:
    """Compute `down(silu(gate(x)) * up(x))` of bf16 [..., I], by linears that pass `is_one_function`; see
    `Producer`."""
    recipes = Recipes(*(linear.fp8_recipe for linear in linears))
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    check_input(x, weights[0])
    apply: Any = _MlpFunction.apply  # untyped in torch
    output: Tensor = apply(x, *weights, *biases, recipes, nonlinear, torch.is_grad_enabled())
    return output
