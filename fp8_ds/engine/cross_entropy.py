"""Liger's loss in a Hugging Face causal LM: fused with the head, so that the logits of a whole batch never exist.

liger-kernel has a forward for each kind of model that it knows and puts it on one instance if asked to. It is asked for
that alone, not for its norms, MLPs and rotary embeddings, which it would put into transformers' modules for good.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8_ds.engine.liger_patches import (
    calls_with_chunk_mem_const,
    keep_out_of_graphs,
    set_chunk_mem_const,
    wait_for_nothing_in_backward,
)
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.matrices import full_shape

_KEY = "fp8.activations.cross_entropy"
_LOSS_OPTION = "fused_linear_cross_entropy"
_CHUNK_KEY = "cross_entropy_chunk_mem_const"
_FAST_CHUNKS = 8
"""With so many Liger's loss takes 1.1 times as long as it can on an H100, with 32 1.6 times (docs/activations.md)."""
_OWN_CONSTANTS = {"gpt_oss": 8}
"""By type of model: what Liger takes where it is told 1, or nothing (0.8.5, transformers/model/gpt_oss.py)."""
_WITHOUT_KERNELS = ("cpu",)
"""Types of device that Liger's Triton kernels do not run on."""


@dataclass(frozen=True)
class LossRefusal:
    """Where Liger's loss cannot be had, or not so: what it is, why, and what to do instead."""

    what: str
    reason: str
    remedy: str
    key: str = _KEY
    default: str = '"stock"'

    def error(self, found: str, value: str = '"liger"') -> UnsupportedError:
        return UnsupportedError(
            f"{self.key}: expected {self.default} with {self.what}, got {value} and {found}: {self.reason}. "
            f"{self.remedy}"
        )


_STOCK = f'Set "{_KEY.rpartition(".")[2]}": "stock"'
NOT_INSTALLED = LossRefusal(
    "no liger-kernel that can be imported",
    "the loss is its code",
    f"`pip install -U liger-kernel` (0.7 or later). {_STOCK} otherwise.",
)
NO_KERNELS = LossRefusal("a CPU", "Liger's kernels are written in Triton", f"{_STOCK} there.")
NO_CHUNK_MEM_CONST = LossRefusal(
    "a liger-kernel whose loss takes no `chunk_mem_const`",
    '"cross_entropy_chunk_mem_const" is handed to it',
    "`pip install -U liger-kernel` (0.8.5 takes it), or remove the key.",
    f"{_KEY}_chunk_mem_const",
    "1",
)
PIPELINE = LossRefusal(
    "a PipelineModule", "its stages compute no loss of their own", "Put Liger's loss into its `loss_fn`."
)
UNKNOWN_MODEL = LossRefusal(
    "a model that is no causal LM of Hugging Face's, or of a type that liger-kernel does not know",
    "its forward is replaced by Liger's, which there is for some models only",
    f"Give the Hugging Face model itself to deepspeed.initialize, or update liger-kernel. {_STOCK} otherwise.",
)
OTHER_FORWARD = LossRefusal(
    "a forward that is not transformers' own",
    "Liger's would replace it, with all that it does beside",
    f"Leave the patching to this key (Trainer: `use_liger_kernel=False`). {_STOCK} otherwise.",
)
OTHER_HEAD = LossRefusal(
    "an `lm_head` that is not an nn.Linear without bias",
    "Liger's loss multiplies by `lm_head.weight` and nothing else: adapters and biases would be left out",
    f"Take `lm_head` out of the adapter's modules. {_STOCK} otherwise.",
)
FP8_HEAD = LossRefusal(
    "an `lm_head` in FP8",
    "Liger's loss reads the weight in bf16",
    'Put "lm_head" into fp8.linear.filter_fqns, where it is by default.',
)
CUT_HEAD = LossRefusal(
    "an `lm_head` that AutoTP has cut",
    "Liger's loss multiplies by `lm_head.weight` and nothing else: by a part of the vocabulary",
    f"{_STOCK} with AutoTP.",
)
LOSS_REFUSALS = (
    NOT_INSTALLED,
    NO_KERNELS,
    NO_CHUNK_MEM_CONST,
    PIPELINE,
    UNKNOWN_MODEL,
    OTHER_FORWARD,
    OTHER_HEAD,
    FP8_HEAD,
    CUT_HEAD,
)


def refuse_loss(model: nn.Module, device_type: str, chunk_mem_const: int = 1) -> None:
    """Nothing happens if Liger's loss can be had in this model. Reads classes and names only; before any collective.

    Args:
        model: what deepspeed.initialize was given.
        device_type: of the accelerator, such as "cuda".
        chunk_mem_const: the key's.

    Raises:
        UnsupportedError: it cannot.
    """
    from deepspeed.runtime.pipe.module import PipelineModule

    if isinstance(model, PipelineModule):
        raise PIPELINE.error(type(model).__name__)
    refuse_liger(device_type, chunk_mem_const)
    lm = _causal_lm(model)
    _liger_patch_of(lm)
    owner = next(kind for kind in type(lm).__mro__ if "forward" in vars(kind))
    forward = vars(lm).get("forward", vars(owner)["forward"])
    if "forward" in vars(lm) or not forward.__module__.startswith("transformers."):
        raise OTHER_FORWARD.error(f"{type(lm).__name__}.forward of {getattr(forward, '__module__', type(forward))}")
    if not owner.__name__.endswith("ForCausalLM"):
        raise UNKNOWN_MODEL.error(owner.__name__)
    head = getattr(lm, "lm_head", None)
    if type(head) is not nn.Linear or head.bias is not None:
        raise OTHER_HEAD.error(f"{'no lm_head' if head is None else head}")


def refuse_liger(device_type: str, chunk_mem_const: int = 1) -> None:
    """Nothing happens if liger-kernel is there, runs on this type of device and takes what the keys say.

    Raises:
        UnsupportedError: it is not, or does not.
    """
    if device_type in _WITHOUT_KERNELS:
        raise NO_KERNELS.error(f"device {device_type}")
    _liger_patches()
    if chunk_mem_const != 1 and not calls_with_chunk_mem_const():
        raise NO_CHUNK_MEM_CONST.error(_liger_version(), str(chunk_mem_const))


def fuse_loss(model: nn.Module, zero_stage: int, chunk_mem_const: int = 1) -> str:
    """The model's own loss is Liger's from now on, in training with labels; nothing else of it has changed.

    Args:
        model: one that `refuse_loss` lets pass; its linears are converted, DeepSpeed's hooks are not on it yet.
        zero_stage: of the optimizer to come. In stage 3 the head's weight is gathered for the whole model's forward and
            backward: the loss reads it without calling the head, whose hooks would gather it.
        chunk_mem_const: logits may be this many times as large as the loss's input. 1: as Liger has it by itself.

    Returns:
        One line that says so.

    Raises:
        UnsupportedError: the head is in FP8 or cut, or this liger-kernel does not do as it says.
    """
    lm = _causal_lm(model)
    if isinstance(lm.lm_head, Fp8Linear):
        raise FP8_HEAD.error(type(lm.lm_head).__name__)
    if type(lm.lm_head) is not nn.Linear:
        raise CUT_HEAD.error(type(lm.lm_head).__name__)
    patch = _liger_patch_of(lm)
    patch(model=lm, **{name: name == _LOSS_OPTION for name in _options(patch)})
    if not getattr(vars(lm).get("forward"), "__module__", "").startswith("liger_kernel."):
        raise UNKNOWN_MODEL.error(f"{type(lm).__name__}, whose forward liger-kernel has left as it was")
    keep_out_of_graphs()
    wait_for_nothing_in_backward()
    if chunk_mem_const != 1:
        set_chunk_mem_const(lm.lm_head.weight, chunk_mem_const)
    if zero_stage == 3:
        from deepspeed.runtime.zero import register_external_parameter

        register_external_parameter(lm, lm.lm_head.weight)
    chunks = f", chunk_mem_const {chunk_mem_const}" if chunk_mem_const != 1 else _hint(lm)
    return f"fp8: cross entropy: Liger's, fused with lm_head{chunks}; with labels in training, logits are None"


def _hint(lm: Any) -> str:
    """Where Liger by itself makes more chunks than are fast: how many, and the key that makes some `_FAST_CHUNKS`."""
    vocabulary, width = full_shape(lm.lm_head.weight)
    num_chunks = most_chunks(width, vocabulary)
    if num_chunks <= _FAST_CHUNKS or not calls_with_chunk_mem_const() or chunk_mem_const_of(lm, 1) != 1:
        return ""
    enough = 1 << (-(-num_chunks // _FAST_CHUNKS) - 1).bit_length()
    return f', in up to {num_chunks} chunks: "{_CHUNK_KEY}": {enough} makes fewer, which is faster'


def most_chunks(width: int, vocabulary: int, chunk_mem_const: int = 1) -> int:
    """Chunks that so many tokens or more are cut into: logits take about the loss's input, or a multiple of it.

    Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py (0.8.5).
    """
    return -(-vocabulary // (chunk_mem_const * width))


def chunk_mem_const_of(lm: Any, told: int) -> int:
    """Return the `chunk_mem_const` that Liger uses for this model if it is given `told`; with 1 its forward decides."""
    own = _OWN_CONSTANTS.get(getattr(getattr(lm, "config", None), "model_type", ""), 1)
    return told if told != 1 else own


def _causal_lm(model: Any) -> Any:
    """The Hugging Face model, out of PEFT's wrapper if it is in one."""
    return model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model


def _liger_patch_of(lm: Any) -> Callable[..., None]:
    """Liger's function for models of this type.

    Raises:
        UnsupportedError: liger-kernel is not installed, or has none that would change the loss alone: one that takes
            `**kwargs` patches models inside of this one, too, with options that are not known here.
    """
    model_type = getattr(getattr(lm, "config", None), "model_type", None)
    patch = _liger_patches().get(model_type)
    if patch is None:
        raise UNKNOWN_MODEL.error(f"{type(lm).__name__} of type {model_type}")
    parameters = inspect.signature(patch).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_more or not {"model", _LOSS_OPTION} <= parameters.keys():
        raise UNKNOWN_MODEL.error(f"{type(lm).__name__} of type {model_type}, whose loss alone cannot be patched")
    return patch


def _liger_patches() -> Any:
    """Liger's functions by the type of model."""
    try:
        return importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise NOT_INSTALLED.error(f"{type(error).__name__} ({error})") from error


def _liger_version() -> str:
    try:
        return f"liger-kernel {importlib.metadata.version('liger-kernel')}"
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "a liger-kernel without a version"


def _options(patch: Callable[..., None]) -> list[str]:
    """Names of what can be switched on and off."""
    parameters = inspect.signature(patch).parameters.values()
    return [parameter.name for parameter in parameters if isinstance(parameter.default, bool)]
