"""Which attention kernel runs, for the plan that rank 0 prints. It says so and changes nothing; huggingface.py in
`fp8_ds.attention` changes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from fp8_ds.attention.huggingface import describe_implementation
from fp8_ds.attention.packages import CUDNN_REMEDY, older_cudnn, prefers_cudnn
from fp8_ds.engine.sdpa_calls import SdpaCall, sdpa_calls

_UNKNOWN = "fp8: attention: as the model has it"
_BACKENDS = {
    SDPBackend.MATH: "plain matmuls and a softmax",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
_PROBE_BYTES = 1 << 20
_PROBE_LENGTH = 64
_MAX_GQA_DIM = 256
"""Up to this head dim transformers (5.23, `use_gqa_in_sdpa`) leaves it to SDPA to repeat keys and values."""
_NUM_KINDS_SHOWN = 3

_HEAD_DIM_NAMES = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size")
_WIDTH_NAMES = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim")
_NUM_HEADS_NAMES = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
_USUAL_HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class AttentionKind:
    """What attention modules have in common that run the same kernel."""

    implementation: str
    """transformers' name of it, such as "sdpa"."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    causal: bool
    dropout: float
    has_mask: bool = False


@dataclass(frozen=True)
class CallKind:
    """What calls of SDPA in a model's own source have in common that run the same kernels.

    Args:
        variants: by head dim and mask, where only a run knows them.
        words: of what they have in common, for the line.
        may_have_mask: whether the line says of masks.
        is_certain: as in `SdpaCall`.
    """

    variants: tuple[AttentionKind, ...]
    words: tuple[str, ...]
    may_have_mask: bool
    is_certain: bool


def describe_attention(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """One line: of Hugging Face models the attention, and of these and of models whose source calls SDPA the kernel
    that it picks; never raises.

    A kernel is what torch answers for self-attention without a mask, as in training without padding and packing
    (docs/activations.md); with one where the source gives one. No kernel runs, nothing is waited for, and no random
    number is drawn.

    Args:
        model: or a module around it.
        device, dtype: that it computes on and in.
    """
    try:
        kinds: list[Callable[..., str]] = [partial(_text, kind) for kind in dict.fromkeys(attention_kinds(model))]
        kinds += [partial(_text_of_call, kind) for kind in _call_kinds(model)]
        texts = [text(device, dtype) for text in kinds[:_NUM_KINDS_SHOWN]]
    except Exception:  # other people's attributes, for a line of text: nothing in it is worth a failed start
        return _UNKNOWN
    if not texts:
        return _UNKNOWN
    more = len(kinds) - len(texts)
    return f"fp8: attention: {'; '.join(texts)}{f'; and {more} other kinds' if more else ''}"


def attention_kinds(model: nn.Module) -> Iterator[AttentionKind]:
    """Of each attention module of transformers': one that knows its configuration and whether it is causal."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if isinstance(implementation, str) and isinstance(getattr(module, "is_causal", None), bool):
            yield _kind(module, config, implementation)


def _kind(attention: Any, config: Any, implementation: str) -> AttentionKind:
    num_heads = getattr(attention, "num_heads", None) or config.num_attention_heads
    of_module = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    head_dim = of_module or getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return AttentionKind(
        implementation,
        num_heads,
        num_heads // getattr(attention, "num_key_value_groups", 1),
        head_dim,
        getattr(attention, "v_head_dim", None) or head_dim,
        attention.is_causal,
        _dropout(attention),
    )


def _call_kinds(model: nn.Module) -> list[CallKind]:
    """Of the calls in its source; none where that cannot be read, which is no reason to say nothing of the rest."""
    try:
        return list(dict.fromkeys(map(_call_kind, sdpa_calls(model))))
    except Exception:  # other people's source and attributes
        return []


def _call_kind(call: SdpaCall) -> CallKind:
    masks = (False, True) if call.has_mask is None else (call.has_mask,)
    num_heads, value_dim = 2, _first_int(call.module, ("v_head_dim",))
    num_kv_heads = 1 if call.is_grouped else num_heads
    variants = tuple(
        AttentionKind(
            "sdpa",
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim or head_dim,
            call.causal is not False and not has_mask,  # torch refuses both
            call.dropout or 0.0,
            has_mask,
        )
        for has_mask in masks
        for head_dim in _head_dims(call.module)
    )
    causal = {True: "causal", False: "not causal", None: "causal or not"}[call.causal]
    dropout = ["without dropout"] if call.dropout is None else _dropout_text(call.dropout)
    words = (*(["grouped heads"] if call.is_grouped else []), causal, *dropout)
    return CallKind(variants, words, call.has_mask is not False, call.is_certain)


def _head_dims(module: nn.Module) -> tuple[int, ...]:
    """That of a module or its configuration, by the names that are in use; else the usual ones."""
    for owner in (module, getattr(module, "config", None)):
        found = _first_int(owner, _HEAD_DIM_NAMES)
        width, num_heads = _first_int(owner, _WIDTH_NAMES), _first_int(owner, _NUM_HEADS_NAMES)
        if not found and width and num_heads and width % num_heads == 0:
            found = width // num_heads
        if found:
            return (found,)
    return _USUAL_HEAD_DIMS


def _first_int(owner: Any, names: Iterable[str]) -> int:
    """The first positive one of these attributes; 0: there is none."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _dropout(attention: Any) -> float:
    """The probability in training: a number of the module's, or an nn.Dropout."""
    names = ("attention_dropout", "attn_dropout", "dropout")
    found = next((value for name in names if (value := getattr(attention, name, None)) is not None), 0.0)
    return float(getattr(found, "p", found))


def _text(kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> str:
    if kind.implementation == "eager":
        return 'eager, which holds all scores in memory; load the model with attn_implementation="sdpa" if it has it'
    if not _calls_sdpa(kind.implementation):
        return describe_implementation(kind.implementation) or kind.implementation
    name = "SDPA" if kind.implementation == "sdpa" else f'SDPA as "{kind.implementation}"'
    backend = _BACKENDS.get(_sdpa_backend(kind, device, dtype))
    if backend is None:
        return name
    heads = f"{kind.num_heads}{'' if kind.num_heads == kind.num_kv_heads else f'/{kind.num_kv_heads}'} heads"
    given = [f"head dim {_dims(kind)}", heads, "causal" if kind.causal else "not causal", *_dropout_text(kind.dropout)]
    return f"{name}, which picks {backend} here ({', '.join([_name(dtype), *given])}){_remedy({backend}, device)}"


def _text_of_call(kind: CallKind, device: torch.device, dtype: torch.dtype) -> str:
    """The kernels by what only a run knows."""
    by_backend: dict[str, list[AttentionKind]] = {}
    for one in kind.variants:
        by_backend.setdefault(_BACKENDS.get(_sdpa_backend(one, device, dtype), "no kernel"), []).append(one)
    picks: list[str] = []
    for backend, kinds in by_backend.items():
        masks = {True: "with a mask", False: "without a mask"}
        given = [f"head dim {' or '.join(dict.fromkeys(map(_dims, kinds)))}", *kind.words]
        if kind.may_have_mask:
            given.append(" or ".join(masks[has_mask] for has_mask in sorted({one.has_mask for one in kinds})))
        picks.append(f"{backend}{'' if picks else ' here'} ({', '.join([_name(dtype), *given])})")
    where = "" if kind.is_certain else " where it is called"
    return f"SDPA{where}, which picks {', '.join(picks)}{_remedy(by_backend, device)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(kind: AttentionKind) -> str:
    return f"{kind.head_dim}{'' if kind.head_dim == kind.value_dim else f'/{kind.value_dim}'}"


def _dropout_text(dropout: float) -> list[str]:
    return [f"dropout {dropout:g}"] if dropout else []


def _remedy(backends: Collection[str], device: torch.device) -> str:
    """Where none is cuDNN for an old one's sake: what to do."""
    is_cudnn = _BACKENDS[SDPBackend.CUDNN_ATTENTION] in backends
    older = older_cudnn() if prefers_cudnn(device) and not is_cudnn else None
    return f"; not cuDNN: {older}; {CUDNN_REMEDY}" if older else ""


def _calls_sdpa(implementation: str) -> bool:
    """Whether it is transformers' SDPA, under whatever name it is registered."""
    if implementation == "sdpa":
        return True
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return function is sdpa_attention_forward


def _sdpa_backend(kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> SDPBackend:
    """What torch would pick for tensors of this kind, less than 1 MiB of them; the length does not matter to it."""
    is_grouped = kind.head_dim == kind.value_dim <= _MAX_GQA_DIM
    num_kv_heads = kind.num_kv_heads if is_grouped else kind.num_heads
    sizes = [(kind.num_heads, kind.head_dim), (num_kv_heads, kind.head_dim), (num_kv_heads, kind.value_dim)]
    bytes_per_token = sum(heads * dim for heads, dim in sizes) * dtype.itemsize
    length = max(2, min(_PROBE_LENGTH, _PROBE_BYTES // bytes_per_token))
    q, k, v = (  # [1, heads, length, dim] over [1, length, heads, dim], as projections leave them
        torch.empty(1, length, *size, dtype=dtype, device=device, requires_grad=True).transpose(1, 2) for size in sizes
    )
    mask = torch.zeros(1, 1, length, length, dtype=dtype, device=device) if kind.has_mask else None
    choice = torch._fused_sdp_choice(
        q, k, v, mask, kind.dropout, kind.causal, enable_gqa=num_kv_heads != kind.num_heads
    )
    return SDPBackend(choice)
