"""A mixture's experts in FP8: transformers 5 keeps those of a layer in two parameters of one module.

Shape suffixes: T tokens, k experts that each of them chose, E experts, P rows (nn/moe/products.py), H hidden and I
intermediate features. One scale for a whole weight does not mind how many matrices it is made of. Scales of rows
or blocks would be kept as those of one matrix: experts with such recipes stay in bf16, but for frozen ones from an FP8
folder, which has blocks for each (nn/moe/stored.py).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.parametrize import is_parametrized

from fp8_ds.nn.fused.mlp import computes_silu
from fp8_ds.nn.fused.module import FORMAT, as_rows, deliver
from fp8_ds.nn.fused.search import parse
from fp8_ds.nn.linear.fp8_linear import Fp8Linear, full_shape, is_bf16_here
from fp8_ds.nn.linear.recipe import Recipe, copied_scales
from fp8_ds.nn.linear.recipes import Bf16Recipe, TensorwiseRecipe
from fp8_ds.nn.moe.products import Groups, grouped_linear, has_one_launch
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.swiglu import swiglu, swiglu_backward_packed

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of weights [E, 2 I, H], gate first, and [E, H, I]."""


_BESIDE = ("_scale_inv", "_activation_scale")
"""Endings of what transformers keeps beside a weight in FP8: scales that multiply, and those of activations."""
_FLAGS = {
    "is_transposed": (False, "transposed weights"),
    "has_bias": (False, "biases"),
    "has_gate": (True, "no gate"),
    "is_concatenated": (True, "gate and up in turn"),
    "has_post_expert_norm": (False, "a norm of each expert"),
    "_is_expert_parallel": (False, "expert-parallel"),
}
"""Flags that transformers' `use_experts_implementation` sets on a class: the value that fits, and what another means.
Versions that do not know a flag do not set it. Source: transformers 5.24 src/transformers/integrations/moe.py."""
_GATE_MODULE = "transformers.integrations.moe"


def stock_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Add up each expert's `down(act(gate(x)) * up(x))` of the tokens that chose it, times their weights for it.

    Args:
        self: num_experts; gate_up_proj [E, 2 I, H], gate first; down_proj [E, H, I]; act_fn.
        hidden_states: [T, H], as is the result.
        top_k_index: int64 [T, k], numbers of experts; num_experts stands for none.
        top_k_weights: [T, k].
    """
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
        current_hidden_states = self.act_fn(gate) * up
        current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
    return final_hidden_states


def is_stock(function: Callable[..., Any]) -> bool:
    """Whether the text is that of `stock_forward`, of this or an earlier transformers 5; False without a source."""
    text = _text(function)
    return text is not None and text == _text(stock_forward)


@functools.cache
def _text(function: Callable[..., Any]) -> str | None:
    """Return the names of the arguments, and the statements without comments and docstring.

    transformers before 5.24 makes the mask without a row for tokens that another rank's experts compute.
    """
    tree = parse(function)
    if tree is None or tree.decorator_list or hasattr(function, "__wrapped__"):
        return None
    text = "\n".join([*(argument.arg for argument in tree.args.args), *map(ast.unparse, tree.body)])
    return text.replace("num_classes=self.num_experts + 1", "num_classes=self.num_experts")


def why_not(module: nn.Module) -> str | None:
    """Say why `Fp8Experts` cannot compute the experts in `module`; None: it can, or there are none in it."""
    if is_experts(module) or not (hasattr(module, "is_transposed") or "gate_up_proj" in module._parameters):
        return None
    for flag, (fitting, reason) in _FLAGS.items():
        if getattr(module, flag, fitting) != fitting:
            return reason
    return "another forward than Mixtral's"


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds experts as Mixtral's, in FP8 or not."""
    return isinstance(module, Fp8Experts) or is_stock_experts(module)


def is_stock_experts(module: nn.Module) -> bool:
    """Whether `module` holds experts as Mixtral's, by flags, names, shapes and text: the same on all ranks."""
    gate = getattr(type(module), "_apply_gate", None)
    return (
        set(module._parameters) - {one for name in WEIGHTS for one in names_beside(module, name)} == set(WEIGHTS)
        and not module._buffers
        and set(module._modules) <= {"act_fn"}
        and callable(getattr(module, "act_fn", None))
        and _has_shapes(module)
        and all(getattr(module, flag, fitting) == fitting for flag, (fitting, _) in _FLAGS.items())
        and (gate is None or getattr(gate, "__module__", None) == _GATE_MODULE)
        and is_stock(_without_gate(type(module).forward))
    )


def names_beside(module: nn.Module, name: str) -> list[str]:
    """Return the names of scales beside the weight `name`, its own first, if it is in FP8 (nn/moe/stored.py)."""
    weight = module._parameters.get(name)
    if weight is None or weight.dtype != E4M3.torch_dtype:
        return []
    return [name + end for end in _BESIDE if module._parameters.get(name + end) is not None]


def _without_gate(forward: Any) -> Any:
    """Unwrap transformers' own `use_experts_implementation`; a wrapper of anybody else stays."""
    is_theirs = getattr(forward, "__globals__", {}).get("__name__") == _GATE_MODULE
    return forward.__wrapped__ if is_theirs and hasattr(forward, "__wrapped__") else forward


def _has_shapes(module: Any) -> bool:
    parameters = [module._parameters[name] for name in WEIGHTS]
    if None in parameters:
        return False
    gate_up, down = map(full_shape, parameters)
    if len(gate_up) != 3 or len(down) != 3:
        return False
    num_experts, two_i, hidden = gate_up
    return num_experts == getattr(module, "num_experts", None) and down == (num_experts, hidden, two_i // 2)


class _PackedSwiglu(torch.autograd.Function):
    """`silu(gate) * up` of packed rows (nn/moe/products.py), bf16 [P, I], rounded where eager bf16 rounds. The product
    with `down_proj` finds it quantised; the gradients of gate and up are one tensor [P, 2 I], gate first."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, recipe: Recipe, record: bool) -> Tensor:
        scaling = recipe.producer_scaling()
        assert scaling is not None, "recipes without one are left to eager"
        gate_PI, up_PI = gate_up.chunk(2, dim=-1)
        output, _ = swiglu(gate_PI, up_PI, FORMAT, scaling, record=record, with_hp=True)
        if record:
            ctx.save_for_backward(gate_up)
        return deliver(output, recipe, scaling, gate_PI.shape, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PI: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward_packed(as_rows(grad_PI), gate_up), None, None


class Fp8Experts(nn.Module):
    """Experts computed in FP8, on tokens sorted by expert; `convert_weight` makes them of an existing module.

    The input is bf16, fp16 or fp32; the output has its dtype. The outputs of a token's experts are added up in the
    dtype of their product with its weights, or in float32 if all experts are computed at once, and rounded once.

    Attributes:
        fp8_recipes: recipes by name, of the weights that the plan puts into FP8.
        bf16_recipe: recipe of a weight that stays in bf16.
    """

    fp8_recipes: dict[str, Recipe]
    bf16_recipe: Recipe
    stock_class: type[nn.Module]
    act_fn: nn.Module

    @classmethod
    def convert_weight(cls, module: nn.Module, name: str, recipe: Recipe) -> None:
        """Put the weight `name` of `module` into FP8, in place: same object, same Parameters, hooks and state dict.

        `is_experts` is true of the module, also for the second of its `WEIGHTS`; the recipe has one scale for a weight,
        or is that of a frozen one from an FP8 folder.
        """
        if not isinstance(module, Fp8Experts):
            stock_class = type(module)
            module.__class__ = cls
            assert isinstance(module, Fp8Experts)
            module.stock_class, module.fp8_recipes = stock_class, {}
            module.bf16_recipe = Bf16Recipe(TensorwiseRecipe(recipe.linear_config))
        module.fp8_recipes[name] = recipe

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute as `stock_forward`."""
        output: Tensor
        if all(self._is_sum(name) for name in WEIGHTS):
            output = self.stock_class.forward(self, hidden_states, top_k_index, top_k_weights)
            return output
        is_plain = all(recipe.is_plain for recipe in self.fp8_recipes.values())
        if is_plain and is_bf16_here(self.gate_up_proj) and is_bf16_here(self.down_proj):
            with torch._C.DisableTorchFunctionSubclass():  # the weights themselves, and no copies of their values
                output = self.stock_class.forward(self, hidden_states, top_k_index, top_k_weights)
                return output
        return self._forward_in_fp8(hidden_states, top_k_index, top_k_weights)

    def _is_sum(self, name: str) -> bool:
        """Whether the weight keeps the bytes of its FP8 folder, and is read in a sum with an adapter, in bf16: PEFT's
        `target_parameters`. Scales of new blocks would lose most of a small adapter."""
        recipe = self.fp8_recipes.get(name)
        return recipe is not None and recipe.is_stored and is_parametrized(self, name)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Apply the gate as the stock class does; transformers' implementations ask a module for it."""
        stock: Any = self.stock_class
        output: Tensor = stock._apply_gate(self, gate_up)
        return output

    # The host reads how many tokens each expert has: a graph would be made anew for any other numbers.
    @_disable_dynamo
    def _forward_in_fp8(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weight: Any = self.gate_up_proj
        # Of transformers' implementations this one casts what it reads; the others raise, as nn.Linear does.
        is_cast = getattr(getattr(self, "config", None), "_experts_implementation", None) == "grouped_mm"
        x = Fp8Linear.checked(hidden_states.to(weight.dtype) if is_cast else hidden_states, weight)
        weights: Any = weight, self.down_proj
        features = [size for one in weights for size in one.shape[1:]]
        is_packed = has_one_launch(top_k_index, features, self.fp8_recipes.values())
        groups = Groups.of(top_k_index, weight.shape[0], is_packed=is_packed)
        gate_up = self._product(x, "gate_up_proj", groups, is_dispatched=False)
        down_PH = self._product(self._hidden(gate_up, groups), "down_proj", groups, is_dispatched=True)
        return groups.combine_weighted(down_PH, top_k_weights, hidden_states.dtype)

    def _hidden(self, gate_up: Tensor, groups: Groups) -> Tensor:
        """Compute `act(gate) * up`, [P, I], also in FP8 if all experts are computed at once and an op does so."""
        recipe = self.fp8_recipes.get("down_proj", self.bf16_recipe)
        is_one_scale = recipe.is_fp8 and not recipe.is_stored
        is_packed = groups.order is not None and is_one_scale and gate_up.dtype == torch.bfloat16
        hidden_PI: Tensor
        if is_packed and computes_silu(self.act_fn):
            apply: Any = _PackedSwiglu.apply  # untyped in torch
            hidden_PI = apply(gate_up, recipe, torch.is_grad_enabled())
        else:
            gate_PI, up_PI = gate_up.chunk(2, dim=-1)
            hidden_PI = self.act_fn(gate_PI) * up_PI
        return hidden_PI

    def _product(self, x: Tensor, name: str, groups: Groups, *, is_dispatched: bool) -> Tensor:
        recipe = self.bf16_recipe if self._is_sum(name) else self.fp8_recipes.get(name, self.bf16_recipe)
        return grouped_linear(x, getattr(self, name), groups, recipe, is_dispatched=is_dispatched)

    def revert(self, name: str) -> None:
        """Put the weight `name` back into bf16; when no weight is left in FP8, the module has its own class again."""
        del self.fp8_recipes[name]
        if not self.fp8_recipes:
            stock_class = self.stock_class
            del self.fp8_recipes, self.bf16_recipe, self.stock_class
            self.__class__ = stock_class  # type: ignore[assignment]

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Fp8Experts:
        super()._apply(fn, recurse)
        for name, recipe in self.fp8_recipes.items():
            recipe.move(getattr(self, name).device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the scales of each weight, as Fp8Linear does."""
        copied = {name: copied_scales(getattr(self, name), recipe) for name, recipe in self.fp8_recipes.items()}
        return {**self.__dict__, "copied": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("copied", {})
        super().__setstate__(state)
        for name, recipe in self.fp8_recipes.items():
            recipe.copied = copied.get(name)

    def extra_repr(self) -> str:
        recipes = {name: self.fp8_recipes.get(name, self.bf16_recipe).describe() for name in WEIGHTS}
        return "\n".join(f"{name}={tuple(getattr(self, name).shape)}, {recipe}" for name, recipe in recipes.items())


@dataclass
class ExpertsWeight:
    """One FP8 weight of a layer's experts, with the interface of an Fp8Linear."""

    module: Fp8Experts
    name: str
    is_parallel: ClassVar[bool] = False
    weight_suffix: ClassVar[str] = ""

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = getattr(self.module, self.name)
        return weight

    @property
    def in_features(self) -> int:
        return full_shape(self.weight)[2]

    @property
    def out_features(self) -> int:
        return full_shape(self.weight)[1]

    @property
    def fp8_recipe(self) -> Recipe:
        return self.module.fp8_recipes[self.name]

    @fp8_recipe.setter
    def fp8_recipe(self, recipe: Recipe) -> None:
        self.module.fp8_recipes[self.name] = recipe

    def revert(self) -> None:
        self.module.revert(self.name)
