"""Models of the parity studies: a GPT-2 and a Llama, by size; their initial weights are bf16 numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT_DECAY = 0.1
HEAD_DIM = 64
"""Of the GPT."""
LLAMA_HEAD_DIM = 128
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Size:
    """A GPT-2 without biases: rotary positions, RMSNorm, GELU, untied head. With `ffn`, a Llama.

    Rotary, not learned: with learned ones the jump in which a model learns to copy from its context came at steps 1,200
    to 1,600 of 3,072, earlier or later by chance, and left paired runs 0.3 % apart (results of 2026-11-21).

    Attributes:
        batch: sequences of a step.
        held_out_tokens: that an evaluation reads.
        ffn: width of a SwiGLU; 0: a GPT.
        kv_heads: of a Llama.
    """

    layers: int
    dim: int
    vocab_size: int
    seq_len: int
    batch: int
    held_out_tokens: int
    ffn: int = 0
    kv_heads: int = 0


SIZES = {
    # 12 x 7.08 M + 2 x 25216 x 768 = 123.7 M parameters, as GPT-2 small with its tied 50257.
    "124m": Size(12, 768, 25216, 1024, 32, 1_048_576),
    # 11 x 71.4 M + 2 x 25216 x 2560 = 915 M. Wide and shallow for its size: 100 M tokens of stock bf16 and of FP8 must
    # fit into half an hour of two GPUs (docs/parity-plans.md), which 16 layers of 2048, as Llama-3.2-1B has, would not.
    "1b": Size(11, 2560, 25216, 1024, 32, 1_048_576, ffn=7168, kv_heads=5),
    # 6 x 3.15 M + 2 x 25216 x 512 = 44.7 M parameters: what parts of the rounding cost, in a minute a run.
    "small": Size(6, 512, 25216, 1024, 32, 1_048_576),
    # 4 x 0.20 M + 2 x 256 x 128 = 0.85 M parameters, bytes: the same question on a CPU, some minutes a run.
    "micro": Size(4, 128, 256, 128, 32, 262_144),
    "tiny": Size(2, 64, 512, 64, 4, 2048),
    "tiny-llama": Size(2, 256, 512, 64, 4, 2048, ffn=384, kv_heads=1),
}


@cache
def rotary_table(seq_len: int, device: torch.device, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, float32 [seq_len, head_dim / 2]."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(seq_len, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [batch, heads, seq_len, head_dim] by their positions, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Of the GPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seq_len, 3, -1, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq_len, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    """Grouped queries and a SwiGLU, as Llama 3 has them."""

    def __init__(self, dim: int, ffn: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * LLAMA_HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * LLAMA_HEAD_DIM, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)
        self.groups = dim // LLAMA_HEAD_DIM // kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            linear(normed).view(batch, seq_len, -1, LLAMA_HEAD_DIM).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Repeated, not enable_gqa: every fused kernel takes that.
        k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq_len, dim))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Or a Llama, by `size`. Args: seed: of the initial weights, which are bf16 numbers."""

    def __init__(self, size: Size, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.head_dim = LLAMA_HEAD_DIM if size.ffn else HEAD_DIM
        self.wte = nn.Embedding(vocab_size, size.dim)
        self.blocks = nn.ModuleList(
            LlamaBlock(size.dim, size.ffn, size.kv_heads) if size.ffn else Block(size.dim) for _ in range(size.layers)
        )
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, vocab_size, bias=False)
        self.loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers if is_residual else 1), generator=generator)
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats, float32 scalar, of int64 tokens [batch, seq_len + 1]."""
        x = self.wte(tokens[:, :-1])
        cos, sin = rotary_table(tokens.shape[1] - 1, tokens.device, self.head_dim)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(self.lm_head(self.norm(x)), tokens[:, 1:])


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def llama_1b() -> nn.Module:
    """For `fp8-ds estimate parity.models:llama_1b`."""
    return GPT(SIZES["1b"], SIZES["1b"].vocab_size, seed=0)
