"""Small models that several test files convert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

from fp8_ds.tp import LLAMA, TensorParallelPlan

MIXER_PLAN = TensorParallelPlan(
    heads=(),
    column=("layers.*.mixer.up",),
    row=("layers.*.mixer.down",),
    row_heads=(),
    blocks=("layers.*.mixer",),
    first="layers.0",
    last="last",
    in_shards=("layers.*.norm", "last"),
)
"""The plan of `MixerModel`."""
WIDTH, HIDDEN = 32, 64
"""Of `MixerModel`."""
MIXTRAL_PLAN = replace(
    LLAMA,
    column=(),
    row=(),
    blocks=("*layers.*.self_attn",),
    in_shards=(*LLAMA.in_shards, "*layers.*.mlp"),
)
"""The plan of transformers' Mixtral, as docs/tensor-parallel.md has it: experts are whole on every rank."""


class Mixer(nn.Module):
    """Tokens of a sequence read each other, causally, by features; `turned` calls its linears by other dims first."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.up(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.up(x)
        h = silu(h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None])
        return self.down(h if scale is None else h * scale)


class MixerLayer(nn.Module):
    def __init__(self, turned: bool, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer(turned)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return x + checkpoint(self.mixer, self.norm(x), use_reentrant=False)
        return x + self.mixer(scale=torch.ones(()), x=self.norm(x))


class MixerModel(nn.Module):
    """Two layers and a head on [batch, sequence, WIDTH]; returns a loss. The same numbers each time.

    Args:
        turned: its linears get views with tokens in other places.
        recomputes: by activation checkpointing.
        shares_norm: the layers' norms have one weight.
    """

    def __init__(self, turned: bool = False, recomputes: bool = False, shares_norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixerLayer(turned, recomputes) for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        generator = torch.Generator().manual_seed(0)  # not torch's own, which threads share
        with torch.no_grad():
            for p in self.parameters():
                drawn = torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2)
                p.copy_(drawn + (p if p.dim() == 1 and bool((p == 1).all()) else 0))
        if shares_norm:
            self.layers[1].norm.weight = self.layers[0].norm.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x)).square().mean()


LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""Sizes of `Llama`; its vocabulary is that of tests/distributed/training.py."""


class Llama(nn.Module):
    """transformers' Llama, or a neighbour of it, under the interface of the training loop: tokens in, the loss out.

    Args:
        family: the name before `Config` and `ForCausalLM`.
        sizes: fields of the configuration in place of `LLAMA_SIZES`.
    """

    def __init__(self, family: str = "Llama", **sizes: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**LLAMA_SIZES, **sizes})
        self.model: Any = getattr(transformers, f"{family}ForCausalLM")(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class SwigluMlp(nn.Module):
    """A SwiGLU MLP as models of the Llama family write it, with a function for the activation."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
