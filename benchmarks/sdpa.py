"""Which kernel `scaled_dot_product_attention` takes in this process, and how to demand cuDNN's."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend


def demand_cudnn() -> None:
    """From now on attention is cuDNN's or fails, in this process."""
    for others in ("flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{others}_sdp")(False)


def picked(batch: int, length: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> str:
    """The kernel for causal attention in bf16 with these sizes, and cuDNN's version: a host may lack the fast one."""
    if device.type != "cuda":
        return "not on a GPU"
    q, k, v = (  # as projections leave them
        torch.empty(batch, length, heads, head_dim, dtype=torch.bfloat16, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=num_heads != num_kv_heads)
    loaded = ".".join(map(str, torch._C._cudnn.getRuntimeVersion()))  # torch.backends' version() raises at an older one
    return f"{SDPBackend(choice).name}, cuDNN {loaded}"
