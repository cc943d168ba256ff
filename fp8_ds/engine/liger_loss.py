"""Liger's fused loss in a Hugging Face causal LM: called by compiled models, with a chosen chunk size.

liger-kernel puts it into a model itself: `apply_liger_kernel_to_llama(model=model, ...)` and its like, or the Trainer's
`use_liger_kernel`. Liger has no options for these changes of its function, which hold for the whole process, until
`fp8_ds.uninstall()`. Tried with 0.7.0 and 0.8.5.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fp8_ds.engine.patches import RECORD
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear, full_shape

_KEY = "fp8.activations.cross_entropy_chunk_mem_const"
_FAST_CHUNKS = 8
"""With 8 chunks Liger's loss takes 1.1 times its shortest time on an H100, with 32 chunks 1.6 (docs/activations.md)."""
_OWN_CONSTANTS = {"gpt_oss": 8}
"""Constant that Liger's forward uses instead of 1, by type of model (0.8.5, transformers/model/gpt_oss.py)."""
_FUNCTIONAL = "liger_kernel.transformers.functional"
_LOSS = "liger_fused_linear_cross_entropy"
_CHUNK = "chunk_mem_const"


def with_liger_loss(model: Any) -> Any | None:
    """Return the causal LM whose forward is Liger's, out of PEFT's wrapper if it is in one; None if there is none."""
    lm = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    module = getattr(getattr(lm, "forward", None), "__module__", None) or ""
    return lm if module.startswith("liger_kernel.") and isinstance(getattr(lm, "lm_head", None), nn.Module) else None


def check_chunks(model: Any, chunk_mem_const: int | None) -> None:
    """Raise if the key sets the size of chunks that do not exist. It reads names only, before any collective.

    Args:
        model: the model that deepspeed.initialize was given.
        chunk_mem_const: value of the key; None if it is not set.

    Raises:
        UnsupportedError: the model's forward is not Liger's, or this Liger cannot be told the size of its chunks.
    """
    if chunk_mem_const is None:
        return
    if with_liger_loss(model) is None:
        forward = getattr(getattr(model, "forward", None), "__module__", "none")
        raise UnsupportedError(
            f"{_KEY}: expected null with a model whose loss is not Liger's, got {chunk_mem_const} and "
            f"{type(model).__name__} with the forward of {forward}. Put the loss there before deepspeed.initialize: "
            "apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, "
            'swiglu=False) or its like (Trainer: "use_liger_kernel" and "liger_kernel_config"), or remove the key.'
        )
    if not calls_with_chunk_mem_const():
        raise UnsupportedError(
            f"{_KEY}: expected null with a liger-kernel whose loss takes no `{_CHUNK}`, got {chunk_mem_const}. "
            "`pip install -U liger-kernel` (0.8.5 takes it), or remove the key."
        )


def prepare_liger_loss(model: nn.Module, zero_stage: int, chunk_mem_const: int | None) -> str | None:
    """Keep Liger's loss out of compiled graphs, and set the size of its chunks.

    Args:
        model: a model with converted linears, and without DeepSpeed's hooks yet.
        zero_stage: stage of the optimizer to come. In stage 3 the head's weight is gathered for the whole model's
            forward and backward: the loss reads it without calling the head, whose hooks would gather it.
        chunk_mem_const: logits may be this many times as large as the loss's input; None: Liger's default.

    Returns:
        One line that says so; None where the model's loss is not Liger's.

    Raises:
        UnsupportedError: the head is in FP8, or sharded by AutoTP.
    """
    lm = with_liger_loss(model)
    if lm is None:
        return None
    _check_head(lm.lm_head)
    keep_out_of_graphs()
    if chunk_mem_const is not None:
        set_chunk_mem_const(lm.lm_head.weight, chunk_mem_const)
    if zero_stage == 3:
        from deepspeed.runtime.zero import register_external_parameter

        register_external_parameter(lm, lm.lm_head.weight)
    chunks = _hint(lm) if chunk_mem_const is None else f", {_CHUNK} {chunk_mem_const}"
    return f"fp8: cross entropy: Liger's, fused with lm_head{chunks}; with labels in training, logits are None"


def _check_head(head: nn.Module) -> None:
    if isinstance(head, Fp8Linear):
        raise UnsupportedError(
            f"fp8.linear.filter_fqns: expected lm_head in bf16 with Liger's loss, which reads its weight, got "
            f'{type(head).__name__}. Put "lm_head" into the key, where it is by default.'
        )
    if type(head).__module__.startswith("deepspeed.module_inject."):
        raise UnsupportedError(
            f"tensor_parallel: expected a whole lm_head with Liger's loss, which multiplies by its weight and nothing "
            f"else, got {type(head).__name__}, a part of the vocabulary. Leave Liger's loss out with AutoTP."
        )


def _hint(lm: Any) -> str:
    """Say how many chunks Liger makes, if they are too many to be fast, and the key that makes some `_FAST_CHUNKS`."""
    vocabulary, width = full_shape(lm.lm_head.weight)
    own = _OWN_CONSTANTS.get(getattr(getattr(lm, "config", None), "model_type", ""), 1)
    num_chunks = most_chunks(width, vocabulary)
    if own != 1 or num_chunks <= _FAST_CHUNKS or not calls_with_chunk_mem_const():
        return ""
    enough = 1 << (-(-num_chunks // _FAST_CHUNKS) - 1).bit_length()
    return f', in up to {num_chunks} chunks: "{_KEY.rpartition(".")[2]}": {enough} makes fewer, which is faster'


def most_chunks(width: int, vocabulary: int, chunk_mem_const: int = 1) -> int:
    """Return how many chunks many tokens are split into: logits take about the loss's input, or a multiple of it.

    Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py (0.8.5).
    """
    return -(-vocabulary // (chunk_mem_const * width))


def keep_out_of_graphs() -> None:
    """Let torch.compile call Liger's kernel without tracing it: the graph breaks there, and numbers are those of eager.

    Its host code reads a count back and loops over chunks of tokens; traced (torch 2.13, liger-kernel 0.8.5) it is
    compiled in pieces. Liger's callers see a traced function that calls the untraced one: they ask for its signature in
    the graph, and torch 2.14 breaks the graph again where that function is untraced.
    """
    functional = importlib.import_module(_FUNCTIONAL)
    original = getattr(functional, _LOSS)
    if hasattr(original, "fp8_ds_original"):
        return
    signature = inspect.signature(original)
    chunk_mem_consts: Any = WeakIdKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        weight = given.arguments.get("weight")
        if weight not in chunk_mem_consts:
            return original(*args, **kwargs)
        given.arguments[_CHUNK] = chunk_mem_consts[weight]
        return original(*given.args, **given.kwargs)

    @functools.wraps(original)  # with its signature: Liger's callers hand over what is in it
    def traced(*args: Any, **kwargs: Any) -> Any:
        return loss(*args, **kwargs)

    called: Any = traced
    called.fp8_ds_original = original
    called.fp8_ds_chunk_mem_consts = chunk_mem_consts
    RECORD.set(functional, _LOSS, called)


def calls_with_chunk_mem_const() -> bool:
    """Whether this liger-kernel takes the size of its chunks: both its function and the autograd function behind it,
    which differs for some backends of Liger."""
    functional = importlib.import_module(_FUNCTIONAL)
    behind = getattr(functional, "LigerFusedLinearCrossEntropyFunction", None)
    functions = (getattr(functional, _LOSS), getattr(behind, "forward", None))
    return all(one is not None and _CHUNK in inspect.signature(one).parameters for one in functions)


def set_chunk_mem_const(weight: Tensor, chunk_mem_const: int) -> None:
    """Compute losses of this head with that constant, whatever their caller says; those of other heads do not change.

    The weight tells one engine's call from another's, because Liger's forwards do not take the constant.

    Args:
        weight: the head's Parameter.
        chunk_mem_const: at least 1. This Liger takes it (`calls_with_chunk_mem_const`), and its loss is wrapped
            (`keep_out_of_graphs`).
    """
    getattr(importlib.import_module(_FUNCTIONAL), _LOSS).fp8_ds_chunk_mem_consts[weight] = chunk_mem_const
