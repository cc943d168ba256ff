"""Models that transformers has loaded from FP8 folders, as an engine takes them over.

On a GPU, transformers' loaders keep weights in FP8 (fp8_ds/nn/linear/stored.py): those of quant_method "fp8" in an
FP8Linear, those of "compressed-tensors" in an nn.Linear with another forward, to be decompressed by the first call.
Before an engine plans, `make_plain` makes nn.Linear of both, and undoes the quantizer. `as_bytes` leads weights and
scales past DeepSpeed's casts, and `take_over` takes the scales, once it is known which weights keep their bytes.

Sources: transformers 5.24, integrations/finegrained_fp8.py `FP8Linear`, quantizers/base.py
`remove_quantization_config`; compressed-tensors 0.20, quantization/lifecycle/apply.py, compressors/model_compressors.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from fp8_ds.engine.ranks import say
from fp8_ds.nn.linear.stored import StoredScales, is_stored, remove_scales, serving_parameters, stored_scales

_OF_FP8_LINEAR = ("has_bias", "block_size", "activation_scheme", "_hf_quantized_needs_local_tp", "_deepgemm_disabled")
_OF_COMPRESSED = ("quantization_scheme", "quantization_status", "forward")
_ZERO_POINT = "weight_zero_point"
_ROUNDED_SCALES = (
    "fp8: scales of FP8 weights came in 16 bits: transformers rounds those of compressed-tensors to the model's dtype. "
    "If the folder has them in float32, load it with dtype=torch.float32 to train what is served"
)
_OF_QUANTIZED_MODEL = ("hf_quantizer", "quantization_method", "_weight_conversions")


def is_linear_of_folder(module: nn.Module) -> bool:
    """Whether `module` is a linear as transformers' loaders make it, or one that `make_plain` has made of it."""
    known = (nn.Linear, getattr(sys.modules.get("transformers.integrations.finegrained_fp8"), "FP8Linear", nn.Linear))
    return type(module) in known and module._parameters.get(_ZERO_POINT) is None


def make_plain(model: nn.Module) -> None:
    """Make the linears of a model from an FP8 folder nn.Linear, in place, with the same Parameters.

    Scales stay beside the weights, frozen. Trainer, PEFT and `save_pretrained` find a model that is not quantised. A
    second call, and any other model, changes nothing.
    """
    linears = list(filter(is_stored, model.modules()))
    for module in linears:
        _make_linear(module)
    for module in model.modules() if linears else ():
        if "hf_quantizer" in vars(module):
            _forget_quantizer(module)


def _make_linear(module: Any) -> None:
    of_class = _OF_FP8_LINEAR if type(module) is not nn.Linear else ()
    of_scheme = _OF_COMPRESSED if "quantization_scheme" in vars(module) else ()
    for name in (*of_class, *of_scheme):
        vars(module).pop(name, None)
    module.__class__ = nn.Linear
    for p in serving_parameters(module):
        p.requires_grad_(False)


def _forget_quantizer(model: Any) -> None:
    """Undo what makes `model` a quantised one for transformers."""
    hook = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:
        hook.remove()
    for name in _OF_QUANTIZED_MODEL:
        vars(model).pop(name, None)
    model.is_quantized = False
    with suppress(AttributeError):
        del model.config.quantization_config


@contextmanager
def as_bytes(model: nn.Module) -> Iterator[None]:
    """Show FP8 weights and their scales as uint8 inside the block: DeepSpeed moves and broadcasts, but casts nothing.

    Before 0.19 it casts whatever is a floating-point number.
    """
    held = []
    for module in filter(is_stored, model.modules()):
        for p in (module._parameters["weight"], *serving_parameters(module)):
            if p.dtype != torch.uint8:
                held.append((p, p.dtype, p.requires_grad))
                p.requires_grad_(False)
                p.data = p.data.contiguous().view(torch.uint8)
    try:
        yield
    finally:
        for p, dtype, is_trainable in held:
            p.data = p.data.view(dtype)
            p.requires_grad_(is_trainable)


@torch.no_grad()
def take_over(model: nn.Module, in_fp8: Collection[str], dtype: torch.dtype) -> dict[int, StoredScales]:
    """Take the scales of FP8 weights off their modules; make `dtype` of the weights, one by one, or bytes.

    Args:
        in_fp8: names of the weights whose layers compute in FP8: the frozen ones among them keep their bytes, as uint8.
        dtype: of the others, codes times scales in float32, rounded.

    Returns:
        The scales, by id of the weight.
    """
    found: dict[int, StoredScales] = {}
    for fqn, module in [(fqn, module) for fqn, module in model.named_modules() if is_stored(module)]:
        weight: Any = module.weight
        stored = stored_scales(module)
        assert stored is not None, f"{fqn} has been accepted, and its scales have changed since"
        remove_scales(module)
        found[id(weight)] = stored
        if f"{fqn}.weight".lstrip(".") in in_fp8 and not weight.requires_grad:
            weight.data = weight.data.view(torch.uint8)
        else:
            weight.data = stored.dequantize(weight.data, dtype)
    if any(one.parameters[0].dtype in (torch.bfloat16, torch.float16) for one in found.values()):
        say(_ROUNDED_SCALES)
    return found


def drop_scales(optimizer: Any, stored: Collection[StoredScales]) -> None:
    """Drop Parameters of scales from an optimizer that a user has built over all parameters of the model."""
    scales = {id(p) for one in stored for p in one.parameters}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in scales]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
