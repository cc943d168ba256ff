"""Models that transformers has loaded from FP8 folders, as an engine takes them over.

On a GPU, transformers' loaders keep weights in FP8 (fp8_ds/nn/moe/stored.py): those of quant_method "fp8" in an
FP8Linear or FP8Experts, those of "compressed-tensors" in an nn.Linear with another forward, to be decompressed by the
first call. Before an engine plans, `make_plain` makes nn.Linear and the model's own experts of them, and undoes the
quantizer. `as_bytes` leads weights and scales past DeepSpeed's casts, and `take_over` takes the scales, once it is
known which weights keep their bytes.

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

from fp8_ds.engine.folder_experts import make_own, own_experts
from fp8_ds.engine.ranks import say
from fp8_ds.nn.linear.stored import StoredScales, is_stored, serving_parameters
from fp8_ds.nn.moe.stored import parameters_beside, remove_beside, scales_of, stored_names

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
    """Make linears of a model from an FP8 folder nn.Linear, and experts its own class, in place.

    They keep their Parameters, and scales stay beside the weights, frozen. Trainer, PEFT and `save_pretrained` find a
    model that is not quantised. A second call, and any other model, changes nothing.
    """
    experts, linears = own_experts(model), list(filter(is_stored, model.modules()))
    for module, own in experts.items():
        make_own(module, own)
    for module in linears:
        _make_linear(module)
    for module in model.modules() if linears or experts else ():
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
    for module, name in [(one, name) for one in model.modules() for name in stored_names(one)]:
        for p in (module._parameters[name], *parameters_beside(module, name)):
            if p is not None and p.dtype != torch.uint8:
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
    for fqn, module, name in [(n, one, name) for n, one in model.named_modules() for name in stored_names(one)]:
        weight: Any = module._parameters[name]
        stored = scales_of(module, name)
        assert stored is not None, f"{fqn} has been accepted, and its scales have changed since"
        remove_beside(module, name)
        found[id(weight)] = stored
        if f"{fqn}.{name}".lstrip(".") in in_fp8 and not weight.requires_grad:
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
