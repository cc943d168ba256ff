"""Which attention kernel runs, for the plan that rank 0 prints. It says so and changes nothing; huggingface.py in
`fp8_ds.attention` changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from fp8_ds.attention.huggingface import describe_implementation
from fp8_ds.attention.packages import CUDNN_REMEDY, older_cudnn, prefers_cudnn

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


def describe_attention(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """One line: for Hugging Face models the attention and the kernel that SDPA picks for it; never raises.

    A kernel is what torch answers for self-attention without a mask, as in training without padding and packing
    (docs/activations.md). No kernel runs, nothing is waited for, and no random number is drawn.

    Args:
        model: or a module around it.
        device, dtype: that it computes on and in.
    """
    try:
        kinds = list(dict.fromkeys(attention_kinds(model)))
        texts = [_text(kind, device, dtype) for kind in kinds[:_NUM_KINDS_SHOWN]]
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
    dims = f"{kind.head_dim}{'' if kind.head_dim == kind.value_dim else f'/{kind.value_dim}'}"
    dropout = f", dropout {kind.dropout:g}" if kind.dropout else ""
    causal = "causal" if kind.causal else "not causal"
    is_cudnn = backend == _BACKENDS[SDPBackend.CUDNN_ATTENTION]
    older = older_cudnn() if prefers_cudnn(device) and not is_cudnn else None
    remedy = f"; not cuDNN: {older}; {CUDNN_REMEDY}" if older else ""
    return (
        f"{name}, which picks {backend} here ({str(dtype).removeprefix('torch.')}, head dim {dims}, {heads}, "
        f"{causal}{dropout}){remedy}"
    )


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
    choice = torch._fused_sdp_choice(
        q, k, v, None, kind.dropout, kind.causal, enable_gqa=num_kv_heads != kind.num_heads
    )
    return SDPBackend(choice)
