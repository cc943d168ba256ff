"""fp8_ds/attention in the `core_attention` slot of Megatron's attention.

The class is a subclass of the class in that slot (Transformer Engine's, or Megatron's own), so that its parameters,
its state dict and its type are those of that class; `forward` computes elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from fp8_ds.attention import BACKENDS, Backend, Packing, attention, require_backend
from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches.recipes import OTHER_ATTENTION

_BF16_OF: dict[str, Backend] = {"fa3_fp8": "fa3", "fa3_fp8_emulated": "reference"}
"""The same kernel in high precision, for layers that stay bf16."""
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_KEY = "fp8_attention_backend"
_STOCK = "stock"


@dataclass(frozen=True)
class AttentionSettings:
    """Values of --fp8-attention-backend and --fp8-attention-hadamard; an unknown backend is refused."""

    backend: Backend
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"--fp8-attention-backend: expected one of {', '.join(BACKENDS)}, got {self.backend}. "
                f"{OTHER_ATTENTION}."
            )


class MegatronFp8Attention:
    """Mix-in before a class that fits the `core_attention` slot.

    Attributes:
        fp8_attention: settings of this layer; None: the host class computes it.
        host_reason: why the host class computes it.
    """

    fp8_attention: AttentionSettings | None
    host_reason: str = ""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        fp8_attention: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, **kwargs)  # type: ignore[call-arg]
        self._fp8_scale = kwargs.get("softmax_scale")
        self._fp8_mask = attn_mask_type
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._fp8_window = tuple(config.window_size) if windowed else None
        self.fp8_attention = fp8_attention
        self._fp8_mask_is_checked = False
        self.host_reason = left_to_host(config, attention_type, kwargs)
        if self.host_reason:
            self.fp8_attention = None
        elif is_first_last_bf16_layer(config, layer_number - 1):
            self.fp8_attention = AttentionSettings(_BF16_OF.get(fp8_attention.backend, fp8_attention.backend))
        if self.fp8_attention is not None:
            require_backend(self.fp8_attention.backend, current_device())

    def finish_init(self, quant_config: Any) -> None:
        """Apply --te-precision-config-file (Megatron's hook): a payload may name this layer's backend, or "stock"."""
        host: Any = super()
        if hasattr(host, "finish_init"):
            host.finish_init(quant_config)
        backend = None if quant_config is None else quant_config.config.get(_KEY)
        if backend is None or self.fp8_attention is None:
            return
        if backend == _STOCK:
            self.fp8_attention, self.host_reason = None, "--te-precision-config-file"
            return
        self.fp8_attention = AttentionSettings(backend, self.fp8_attention.hadamard and backend in _BF16_OF)
        require_backend(backend, current_device())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [s, b, heads x dim] of query [s, b, heads, dim], key and value with fewer heads; packed: [t, ...].

        In evaluation the host class computes it, except for packed sequences where that is Megatron's own, which
        refuses them.
        """
        settings, mask = self.fp8_attention, attn_mask_type or self._fp8_mask
        refuses_packed = packed_seq_params is not None and isinstance(self, DotProductAttention)
        needs_host = (
            settings is None
            or attention_bias is not None
            or any(extra is not None for extra in kwargs.values())
            or mask not in (*_CAUSAL, AttnMaskType.no_mask)
            or (mask == AttnMaskType.padding_causal and packed_seq_params is None)
            or not (cast(Any, self).training or refuses_packed)
        )
        if needs_host:
            host: Any = super()
            return cast(
                Tensor,
                host.forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attn_mask_type=attn_mask_type,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params,
                    **kwargs,
                ),
            )
        assert settings is not None
        if mask in _CAUSAL and attention_mask is not None and packed_seq_params is None:
            self._check_mask(attention_mask, query.shape[0], key.shape[0])
        options: dict[str, Any] = {
            "backend": settings.backend,
            "hadamard": settings.hadamard,
            "causal": mask in _CAUSAL,
            "window": self._fp8_window,
            "softmax_scale": self._fp8_scale,
        }
        if packed_seq_params is not None:
            out = attention(query, key, value, packing=_packing(packed_seq_params), **options)
            return out.reshape(out.shape[0], -1)
        out = attention(*(x.transpose(0, 1) for x in (query, key, value)), **options)
        return out.transpose(0, 1).reshape(*query.shape[:2], -1)

    def _check_mask(self, attention_mask: Tensor, num_q: int, num_k: int) -> None:
        """Check that the first mask of this layer is causal; later ones are not read, for each waits for the device.

        Raises:
            UnsupportedError: it masks other keys.
        """
        if self._fp8_mask_is_checked:
            return
        self._fp8_mask_is_checked = True
        causal = torch.ones(num_q, num_k, dtype=torch.bool, device=attention_mask.device).triu(1 + num_k - num_q)
        if not bool((attention_mask.bool() == causal).all()):
            raise UnsupportedError(
                "attention_mask: expected none or a causal one with attention by fp8_ds, got another. Pass packed "
                "sequences (packed_seq_params), attn_mask_type arbitrary for Megatron's own attention, or leave out "
                "--fp8-attention-backend."
            )

    def extra_repr(self) -> str:
        settings = self.fp8_attention
        text = f"attention={_STOCK} ({self.host_reason})" if settings is None else f"attention={settings.backend}"
        return ", ".join(part for part in (super().extra_repr(), text) if part)  # type: ignore[misc]


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def left_to_host(config: Any, attention_type: str = "self", kwargs: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return why the host class has to compute attention; empty if it does not have to.

    Args:
        config: a TransformerConfig.
        attention_type: "self" or "cross".
        kwargs: other arguments that Megatron makes the attention with.
    """
    given = kwargs.get("attention_dropout")
    dropout = config.attention_dropout if given is None else given
    reasons = (
        (config.context_parallel_size > 1, "context parallelism"),
        (bool(dropout), f"attention dropout {dropout}"),
        (attention_type != "self", "cross-attention"),
        (getattr(config, "softmax_type", "vanilla") != "vanilla", "softmax with an offset"),
        (getattr(config, "qk_clip", False), "qk_clip reads the logits"),
        (getattr(config, "log_max_attention_logit", False), "--log-max-attention-logit"),
        (getattr(config, "deterministic_mode", False), "--deterministic-mode"),
        (getattr(config, "batch_invariant_mode", False), "--batch-invariant-mode"),
        (kwargs.get("k_channels") != kwargs.get("v_channels"), "MLA: values of another dim than keys"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _packing(params: Any) -> Packing:
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        padded, plain = getattr(params, name, None), getattr(params, name.removesuffix("_padded"))
        if padded is not None and padded is not plain:
            raise UnsupportedError(
                f"packed_seq_params.{name}: expected none, got sequences with padding between them. Pack without "
                "padding, or leave out --fp8-attention-backend."
            )
    if params.qkv_format != "thd":
        raise UnsupportedError(
            f"packed_seq_params.qkv_format: expected thd, got {params.qkv_format}. Leave out --fp8-attention-backend."
        )
    ends_q, ends_k = params.cu_seqlens_q, params.cu_seqlens_kv
    longest = (
        int(ends.diff().max() if given is None else given)
        for ends, given in ((ends_q, params.max_seqlen_q), (ends_k, params.max_seqlen_kv))
    )
    return Packing(ends_q, ends_k, *longest)


@functools.cache
def attention_class(host: type) -> type:
    """Return a subclass of `host` with our attention before it."""
    return type(f"Fp8{host.__name__}", (MegatronFp8Attention, host), {"__module__": __name__})
