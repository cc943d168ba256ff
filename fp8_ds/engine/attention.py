"""Description of the model's attention for the log. It changes nothing; `attention/huggingface.py` does."""

from __future__ import annotations

import torch
from torch import nn

from fp8_ds.attention.huggingface import attention_modules, describe_implementation
from fp8_ds.attention.packages import CUDNN_REMEDY, older_cudnn, prefers_cudnn

_EAGER = 'eager, which holds all scores in memory; load the model with attn_implementation="sdpa" if it has it'
_OWN = "as the model has it"


def describe_attention(model: nn.Module, device: torch.device) -> str:
    """Name the attention implementations of a Hugging Face model; another model's is "as the model has it".

    The line also names a cuDNN older than torch's, because SDPA then silently leaves cuDNN out.

    Args:
        model: the model, or a module around it.
        device: the one that it trains on.
    """
    try:
        names = dict.fromkeys(config._attn_implementation for _, config in attention_modules(model))
    except Exception:  # properties of other people's modules may raise anything: a line is not worth a failed start
        names = {}
    texts = [_EAGER if name == "eager" else describe_implementation(name) or name for name in names] or [_OWN]
    may_be_sdpa = not names or any(describe_implementation(name) is None for name in names)
    if may_be_sdpa and prefers_cudnn(device) and (older := older_cudnn()):
        texts.append(f"SDPA may not take cuDNN: {older}; {CUDNN_REMEDY}")
    return f"fp8: attention: {'; '.join(texts)}"
