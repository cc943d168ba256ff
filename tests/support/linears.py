"""FP8 linears alone, their weights as ZeRO holds them, and one training step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.parameter import retype
from fp8_ds.nn.linear.payload import OF_RECIPE, Fp8Payload
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.linear.recipes import (
    BlockwiseRecipe,
    DelayedRecipe,
    RowwiseGradWeightHpRecipe,
    RowwiseRecipe,
    TensorwiseRecipe,
)
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import AmaxHistory, scale_from_amax
from fp8_ds.ops.quantize import quantize

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
_CLASSES = {kind.name: kind for kind in (TensorwiseRecipe, RowwiseRecipe, RowwiseGradWeightHpRecipe, BlockwiseRecipe)}


def fp8_of(
    linear: nn.Linear,
    recipe: str = "tensorwise",
    input_cache: InputCache | None = None,
    history: AmaxHistory | None = None,
    **keys: Any,
) -> Any:
    """Return a converted copy; `linear` stays the reference. With "delayed" it has `history`, by default its own."""
    config = LinearConfig.model_validate({"recipe": recipe, **keys})
    if recipe == "delayed":
        history = AmaxHistory(2, [E4M3.max, E5M2.max]) if history is None else history
        made: Any = DelayedRecipe(config, history, 0, 1, input_cache)
    else:
        made = _CLASSES[recipe](config, input_cache)
    return Fp8Linear.from_linear(copy.deepcopy(linear), made)


def convert(model: nn.Module, **keys: Any) -> Any:
    """Put the linears of `model` into FP8 as an engine with this "linear" block does; return its AmaxHistory."""
    config = LinearConfig.model_validate(keys)
    return apply_plan(model, make_plan(model, config), config, "cpu")


def attach_payload(linear: Any, recipe: str = "tensorwise", values: Tensor | None = None) -> Fp8Payload:
    """Put the weight's bytes, or those of `values`, beside it as ZeRO does; the Parameter itself reads NaN then.

    Args:
        recipe: whose scales the weight has: "tensorwise" for any recipe where masters are split.
    """
    weight: Any = linear.weight
    values = weight.detach() if values is None else values
    granularity = OF_RECIPE[recipe]
    scale, scale_inv = granularity.scales(granularity.amax(values.reshape(-1), values.shape))
    payload = Fp8Payload("weight", scale, scale_inv, weight.dtype)
    payload.data = payload.quantize(values)
    weight.data = payload.nominal(weight.shape)
    weight._fp8 = payload
    return payload


def as_fp8_parameter(p: Any, writable: bool = True) -> Tensor:
    """Make `p` an FP8 weight as ZeRO 1 and 2 do, or ZeRO 3 (not writable); return the values that readers see."""
    scale, scale_inv = scale_from_amax(p.data.float().abs().max(), E4M3.max)
    payload = Fp8Payload("w", scale, scale_inv, p.dtype)
    payload.data = quantize(p.data, scale, E4M3)

    def write(value: Tensor) -> None:
        new_scale, new_scale_inv = scale_from_amax(value.float().abs().max(), E4M3.max)
        payload.scale.copy_(new_scale)
        payload.scale_inv.copy_(new_scale_inv)
        payload.data = quantize(value, payload.scale, E4M3)

    payload.write = write if writable else None
    retype(p, payload)
    return payload.dequantize()


def step_of(linear: Any, x: Tensor, grad_output: Tensor | None = None, function: Any = None) -> list[Any]:
    """Return output, and gradients of input, weight and bias (None without one). `function` computes in its place."""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    output = linear(x) if function is None else function(x)
    output.backward(torch.ones_like(output) if grad_output is None else grad_output)
    return [output.detach(), x.grad, linear.weight.grad, None if linear.bias is None else linear.bias.grad]


def saved_bytes(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Return how many bytes autograd keeps for backward, each storage once, without parameters; and the output."""
    storages, parameters = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    return sum(storages.values()), output
