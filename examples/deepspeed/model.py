"""A Llama-style decoder over bytes: RMSNorm, rotary positions, SwiGLU, causal SDPA, plain `nn.Linear` everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 256


@dataclass(frozen=True)
class ModelSize:
    dim: int
    ffn_dim: int
    num_layers: int
    head_dim: int = 64

    @property
    def num_heads(self) -> int:
        return self.dim // self.head_dim


SIZES = {
    "tiny": ModelSize(dim=64, ffn_dim=192, num_layers=2, head_dim=32),  # 0.1 M parameters: the tests
    "small": ModelSize(dim=256, ffn_dim=704, num_layers=4),  # 3.3 M: two CPU cores
    "100m": ModelSize(dim=768, ffn_dim=2048, num_layers=12),  # 85 M
    "1b": ModelSize(dim=2048, ffn_dim=5632, num_layers=24, head_dim=128),  # 1.2 B
    "7b": ModelSize(dim=4096, ffn_dim=11008, num_layers=32, head_dim=128),  # 6.5 B
}


def rotary_tables(seq_len: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [seq_len, head_dim / 2]; computed per forward, for a buffer would be cast to bf16."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with each pair (first half, second half of the last dim) turned by its position's angle; same dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.v_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = (
            proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq_len, dim))


class SwiGLU(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn_dim, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn_dim, bias=False)
        self.down_proj = nn.Linear(size.ffn_dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class ByteLlama(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-byte cross entropy in nats, float32 scalar, of int64 tokens [batch, seq_len + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        cos, sin = rotary_tables(inputs.shape[1], self.size.head_dim, inputs.device)
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), targets.reshape(-1))
