"""--fp8-drop-transposes: the transpose of an FP8 weight exists from the backward that reads it to that backward's end.

Hopper multiplies FP8 in one layout only, so grad_input reads a transpose of the weight. Transformer Engine keeps one of
every FP8 weight, a byte a parameter, made anew when the bytes change. It makes one in a backward, too, where it finds
none; here it finds none. Each further backward of a step, one per micro-batch, makes each transpose once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.core.fp8_utils import is_float8tensor
from torch import nn

from megatron_patches import compat

_MARK = "_fp8_ds_drops_transposes"
_PRIVATE = ("_quantizer", "update_usage")
"""Attributes of Float8Tensor in Transformer Engine 2.11, pytorch/tensor/storage/float8_tensor_storage.py."""


def drop(weight: Any) -> None:
    """Free the transpose of a weight; the next backward makes one."""
    weight.update_usage(columnwise_usage=False)


def drop_all(model_chunks: Iterable[nn.Module]) -> None:
    """Keep no transpose of these modules' FP8 weights outside its own backward. A second call changes nothing."""
    for chunk in model_chunks:
        for module in chunk.modules():
            weights = [p for p in module.parameters(recurse=False) if is_float8tensor(p) and p.requires_grad]
            new = [p for p in weights if not getattr(p, _MARK, False)]
            compat.require_private(
                new, _PRIVATE, "--fp8-drop-transposes needs it: use that version, or leave the flag out."
            )
            for p in new:
                setattr(p, _MARK, True)
                drop(p)
                p.register_post_accumulate_grad_hook(drop)
            if new:
                module.register_forward_pre_hook(_ask_for_none)
                module.register_forward_hook(_drop_own)


def without_ours(original: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
    """Wrap `post_all_gather_processing`, which makes transposes of weights whose bytes are new."""

    def post_all_gather_processing(model_params: Sequence[Any]) -> None:
        original([p for p in model_params if not getattr(p, _MARK, False)])

    return post_all_gather_processing


def _ask_for_none(module: nn.Module, _: Any) -> None:
    # In each forward: Transformer Engine gives weights new quantizers when a recipe changes.
    for p in module.parameters(recurse=False):
        if getattr(p, _MARK, False):
            p._quantizer.set_usage(columnwise=False)  # type: ignore[attr-defined]


def _drop_own(module: nn.Module, *_: Any) -> None:
    for p in module.parameters(recurse=False):
        if getattr(p, _MARK, False):
            drop(p)
