"""Experts of models that transformers has loaded from FP8 folders: the model's own class in place of the quantizer's.

transformers' quantizer puts an FP8Experts wherever a module is called "experts", and what class the model's code has
there is lost. So the code is run again without memory, on the device "meta", and says it.

Source: transformers 5.24, integrations/finegrained_fp8.py `FP8Experts`, `replace_with_fp8_linear`.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

from fp8_ds.nn.linear.fp8_linear import full_shape
from fp8_ds.nn.moe.experts import WEIGHTS, is_stock_experts
from fp8_ds.nn.moe.stored import parameters_beside

_OF_ADAPTERS = "base_layer"
"""Name below which PEFT keeps a module that it wraps."""
_OF_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_CONFIG = "config"
"""Attribute that is the model's own object in the quantizer's module, and a copy of it in that on "meta"."""
_OF_QUANTIZER = ("_hf_quantized_needs_local_tp", "_deepgemm_disabled")


def own_experts(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the modules of experts that transformers keeps in FP8, each with its model's own module, on "meta".

    Those whose own is another than Mixtral's, or cannot be told, are left out.
    """
    fp8_class = _class("transformers.integrations.finegrained_fp8", "FP8Experts")
    model_class = _class("transformers.modeling_utils", "PreTrainedModel")
    if fp8_class is None or model_class is None or not any(type(one) is fp8_class for one in model.modules()):
        return {}
    found: dict[nn.Module, nn.Module] = {}
    for inner in filter(lambda module: isinstance(module, model_class), model.modules()):
        experts = {fqn: module for fqn, module in inner.named_modules() if type(module) is fp8_class}
        rebuilt = _rebuild(inner) if experts else None
        for fqn, module in experts.items():  # the innermost model says last
            own = _at(rebuilt, fqn)
            found.pop(module, None)
            if own is not None and _fits(module, own):
                found[module] = own
    return found


def make_own(module: Any, own: Any) -> None:
    """Make `module`, in place and with the same Parameters, of the class of `own`; scales stay beside, frozen.

    What others have noted on it stays, such as transformers, that it has its values.
    """
    kept = {
        name: value
        for name, value in vars(module).items()
        if name in _OF_MODULE or name == _CONFIG or (name.startswith("_") and name not in _OF_QUANTIZER)
    }
    state = {name: value for name, value in vars(own).items() if name not in _OF_MODULE}
    vars(module).clear()
    vars(module).update(state | kept)
    module._modules = own._modules
    for name in [name for name, p in module._parameters.items() if p is None]:
        del module._parameters[name]
    module.__class__ = type(own)
    module.train(module.training)
    for name in WEIGHTS:
        for p in parameters_beside(module, name):
            p.requires_grad_(False)


def _class(module: str, name: str) -> Any:
    """Return a class if its module has been imported: else nothing here is of it."""
    return getattr(sys.modules.get(module), name, None)


def _rebuild(model: Any) -> nn.Module | None:
    """Run the code of `model` again, without memory for weights; None if its class wants more than a config."""
    try:
        with torch.device("meta"):
            rebuilt: nn.Module = type(model)(copy.deepcopy(model.config))
    except Exception:  # anybody's code, which may want or do anything: then the class of the experts is not known
        return None
    return rebuilt


def _at(model: nn.Module | None, fqn: str) -> nn.Module | None:
    """Return the module of a model without adapters that has the name `fqn` in one with; None if there is none."""
    if model is None:
        return None
    name = ".".join(part for part in fqn.split(".") if part != _OF_ADAPTERS)
    return dict(model.named_modules()).get(name)


def _fits(module: Any, own: Any) -> bool:
    """Whether `own` is as Mixtral's, of the same shapes, and nobody has replaced the forward of `module`."""
    return (
        is_stock_experts(own)
        and all(name in module._parameters for name in WEIGHTS)
        and all(full_shape(module._parameters[name]) == full_shape(own._parameters[name]) for name in WEIGHTS)
        and next(own.act_fn.parameters(), None) is None
        and next(own.act_fn.buffers(), None) is None
        and "forward" not in vars(module)
    )
