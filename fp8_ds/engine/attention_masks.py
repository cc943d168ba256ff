"""Attention masks of transformers: none is made where SDPA's own causal kernel does the same.

transformers (5.17 to 5.24) decides by data that no graph can read: whether sequences are packed by `position_ids`, and
whether a mask has padding. With torch 2.11 it takes every graph for an export, too. So a compiled model has a mask of
[batch, 1, length, length] in training, with which SDPA takes no causal kernel and keys and values are repeated for
grouped queries; in eager the host waits for the device.

Here the arguments of the model that makes the masks decide: without `position_ids` all of transformers' own models
count tokens from 0, so that nothing is packed. That holds in graphs and in eager, and no tensor on a device is read.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8_ds.attention.huggingface import attention_modules, is_causal_alone
from fp8_ds.engine.patches import RECORD

_SDPA, _FIND = "sdpa", "find_packed_sequence_indices"
_MASK = "attention_mask"
"""Key of the mask in a batch."""
_FULL_AT = "_fp8_ds_full_at_version"
"""Attribute of a mask of ones that Accelerate has moved: its version then."""


class CausalMasks:
    """Two functions of transformers as they are called inside the models of engines with FP8.

    It stands in transformers' registry of mask functions, from which hooks on modules reach it: hooks must be functions
    for a model to be copied or pickled.

    Attributes:
        now: of this thread; its `is_plain` is true while a model runs that was given neither mask nor positions.
    """

    def __init__(self, make_mask: Callable[..., Any], find_packed: Callable[[Tensor], Tensor | None]) -> None:
        self.make_mask = make_mask
        self.find_packed = find_packed
        self.now = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return None where SDPA's `is_causal` is this very mask, else what transformers makes."""
        if getattr(self.now, "is_plain", False) and not args and is_causal_alone(**kwargs):
            return None
        return self.make_mask(*args, **kwargs)

    def find_packed_sequence_indices(self, position_ids: Tensor) -> Tensor | None:
        """Return None without a look where the model was given no positions, else what transformers finds."""
        return None if getattr(self.now, "is_plain", False) else self.find_packed(position_ids)


def make_fewer_masks(model: nn.Module) -> list[RemovableHandle]:
    """Let transformers' causal models in `model` have no mask where none is needed.

    transformers' functions are replaced for the whole process until `fp8_ds.uninstall()`, and change nothing outside
    these models.

    Returns:
        Handles of the new hooks; none where `model` has no such model, or this transformers has no such functions.
    """
    found = list(_causal_models(model))
    if not found or not _patch():
        return []
    _mark_full_masks()
    return [
        hook
        for module in found
        for hook in (
            module.register_forward_pre_hook(_before, with_kwargs=True),
            module.register_forward_hook(_after, always_call=True),
        )
    ]


def _patch() -> bool:
    """Put `CausalMasks` in place, once; return whether it is there."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    masks = getattr(getattr(masking, "AttentionMaskInterface", None), "_global_mapping", {})
    if isinstance(masks.get(_SDPA), CausalMasks):
        return True
    find = getattr(masking, _FIND, None)
    if _SDPA not in masks or find is None or list(inspect.signature(find).parameters) != ["position_ids"]:
        return False
    ours = CausalMasks(masks[_SDPA], find)
    RECORD.set(masks, _SDPA, ours)
    RECORD.set(masking, _FIND, ours.find_packed_sequence_indices)
    return True


def _mark_full_masks() -> None:
    """Note in Accelerate's data loaders, which Trainer uses, whether a mask is all ones before it leaves the CPU.

    Reading it on a device would make the host wait. Tested: accelerate 1.15.0.
    """
    loading: Any = sys.modules.get("accelerate.data_loader")
    send = getattr(loading, "send_to_device", None)
    if send is None or hasattr(send, "fp8_ds_original"):
        return

    @functools.wraps(send)
    def look_and_send(batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = batch.get(_MASK, None) if isinstance(batch, Mapping) else None  # BatchEncoding is moved in place
        is_full = type(before) is Tensor and before.device.type == "cpu" and _is_full(before)
        moved = send(batch, *args, **kwargs)
        mask = moved.get(_MASK, None) if is_full and isinstance(moved, Mapping) else None
        if type(mask) is Tensor and not mask.is_inference():
            setattr(mask, _FULL_AT, mask._version)
        return moved

    look_and_send.fp8_ds_original = send  # type: ignore[attr-defined]
    RECORD.set(loading, "send_to_device", look_and_send)


def _is_full(mask: Tensor) -> bool:
    """Whether a mask is known to be all ones, without waiting for a device."""
    if mask.device.type == "cpu":
        return bool((mask == 1).all())
    version = getattr(mask, _FULL_AT, None)
    return version is not None and version == mask._version


def _causal_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost models of transformers, which make the masks, where all attention is causal."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    for module in model.modules():
        inside = (child for child in module.modules() if child is not module)
        if isinstance(module, base) and is_causal_model(module) and not any(isinstance(m, base) for m in inside):
            yield module


def is_causal_model(module: nn.Module) -> bool:
    """Whether all attention in a module is causal, and its forward one of transformers' own models'.

    Another forward may make positions of its own, or expect a mask. All modules are looked at: call it once.
    """
    name = getattr(module.forward, "__module__", None) or ""
    return name.startswith("transformers.models.") and {m.is_causal for m, _ in attention_modules(module)} == {True}


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Note whether a model's masks are causal alone (forward pre-hook). Traced into graphs.

    It reads the flag of torch.export, because `torch.compiler.is_exporting()` is True in every graph of torch 2.11.
    """
    ours = _ours()
    if ours is not None:
        if not torch.compiler.is_compiling():
            kwargs = without_full_mask(args, kwargs)
        ours.now.is_plain = (
            len(args) < 2  # as transformers calls its models; by position any argument could follow
            and kwargs.get(_MASK) is None
            and kwargs.get("position_ids") is None
            and not torch.compiler._is_exporting_flag
            and not torch._C._get_tracing_state()
        )
    return args, kwargs


def _after(module: nn.Module, args: Any, output: Any) -> None:
    ours = _ours()
    if ours is not None:
        ours.now.is_plain = False


def _ours() -> CausalMasks | None:
    """Return what stands in transformers' registry; None after `fp8_ds.uninstall()`."""
    from transformers.masking_utils import AttentionMaskInterface

    found = AttentionMaskInterface._global_mapping.get(_SDPA)
    return found if isinstance(found, CausalMasks) else None


def without_full_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's keyword arguments, without a mask of ones where there is no cache and no position.

    A mask that is on a device is one of ones if an Accelerate data loader has moved it there and its version has not
    changed since; writes into its `data` and collectives do not change it.

    Args:
        args, kwargs: the model's; its tokens are the first, or `input_ids` or `inputs_embeds`.
    """
    mask, tokens = kwargs.get(_MASK), args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if (
        type(mask) is not Tensor
        or not isinstance(tokens, Tensor)
        or len(args) > 1
        or mask.dim() != 2
        or mask.shape != tokens.shape[:2]
        or any(kwargs.get(name) is not None for name in ("position_ids", "past_key_values", "cache"))
        or torch._C._get_tracing_state()
        or not _is_full(mask)
    ):
        return kwargs
    return {name: value for name, value in kwargs.items() if name != _MASK}
