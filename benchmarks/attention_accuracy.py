"""Inputs of attention, and how far each backend's output and gradients are from float64: part of attention.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results_io import ROOT
from torch import Tensor

from fp8_ds.attention import attention, heads, reference
from fp8_ds.attention.shapes import Geometry
from fp8_ds.testing import sqnr_db

NAMES = ("out", "dq", "dk", "dv")
OUTLIER_CHANNELS, OUTLIER_FACTOR = 2, 30.0
"""Channels of q and k that are larger, and by what: what trained models show in whole channels is about 20 (Dettmers et
al., arXiv 2208.07339)."""
RARE, RARE_SIGMA = 0.001, 10.0
"""FlashAttention-3's own experiment: N(0, 1) plus N(0, 100) for one element in a thousand (arXiv 2407.08608, 4.3)."""


@dataclass(frozen=True)
class Inputs:
    """bf16 [1, sequence, heads, dim] of one causal attention, and the gradient of its output."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    def to(self, device: str) -> Inputs:
        return Inputs(self.name, *(x.to(device, torch.bfloat16) for x in (self.q, self.k, self.v, self.grad_out)))


def normal(num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return Inputs("normal", *(torch.randn(1, num_tokens, size, dim, generator=generator) for size in sizes))


def outlier_channels(inputs: Inputs) -> Inputs:
    """The same with some channels of q and k larger, others in each head; scores have the variance that they had."""
    generator = torch.Generator().manual_seed(1)
    dim = inputs.q.shape[-1]
    factors = []
    for x in (inputs.q, inputs.k):
        factor = torch.ones(x.shape[2], dim)
        for head in factor:
            head[torch.randperm(dim, generator=generator)[:OUTLIER_CHANNELS]] = OUTLIER_FACTOR
        factors.append(factor)
    of_keys = factors[1].repeat_interleave(len(factors[0]) // len(factors[1]), 0)
    scores = (factors[0] * of_keys).square().mean().sqrt()
    q, k = (x * factor / scores.sqrt() for x, factor in zip((inputs.q, inputs.k), factors, strict=True))
    return Inputs("outlier channels", q, k, inputs.v, inputs.grad_out)


def rare_outliers(inputs: Inputs) -> Inputs:
    """The same plus large numbers in one element of a thousand of q, k and v."""
    generator = torch.Generator().manual_seed(2)

    def add(x: Tensor) -> Tensor:
        chosen = torch.rand(x.shape, generator=generator) < RARE
        return x + chosen * RARE_SIGMA * torch.randn(x.shape, generator=generator)

    return Inputs("rare outliers", add(inputs.q), add(inputs.k), add(inputs.v), inputs.grad_out)


def trained(head_dim: int, steps: int, num_tokens: int, device: str) -> list[Inputs]:
    """Of the first and last layer of the example's model after `steps` on the standard library's text."""
    sys.path.insert(0, str(ROOT / "examples/deepspeed"))
    from data import read_stdlib, sample_batch
    from model import ByteLlama, ModelSize

    torch.manual_seed(0)
    model = ByteLlama(ModelSize(dim=256, ffn_dim=704, num_layers=4, head_dim=head_dim)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = read_stdlib("train")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        loss = model(sample_batch(text, 8, 256, seed=0, index=step).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained {steps} steps, head dim {head_dim}: loss {loss.item():.3f}", flush=True)
    calls = captured(lambda: model(sample_batch(text, 1, num_tokens, seed=1, index=0).to(device)).backward())
    return [Inputs(f"trained, {name} layer", *calls[i]) for name, i in (("first", 0), ("last", -1))]


def captured(run: Callable[[], object]) -> list[list[Tensor]]:
    """(q, k, v, gradient of the output), [batch, sequence, heads, dim] on CPU, of each SDPA call that `run` makes."""
    calls: list[list[Tensor]] = []
    stock = F.scaled_dot_product_attention

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        out = stock(*tensors, **options)
        call = [x.detach().transpose(1, 2).cpu() for x in tensors[:3]]
        calls.append(call)
        out.register_hook(lambda grad: call.append(grad.detach().transpose(1, 2).cpu()))
        return out

    F.scaled_dot_product_attention = spy
    try:
        run()
    finally:
        F.scaled_dot_product_attention = stock
    return calls


def from_file(path: Path) -> list[Inputs]:
    """A dict of name -> (q, k, v, grad_out) that torch.save wrote."""
    return [Inputs(name, *tensors) for name, tensors in torch.load(path, map_location="cpu").items()]


Compute = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]
"""(q, k, v, gradient of the output) -> (output, dq, dk, dv)."""


def through_autograd(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Compute:
    def compute(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = forward(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    return compute


def inconsistent(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """What is not done here: FP8 forward, backward on the bf16 q, k and v with the FP8 forward's log-sum-exp."""
    geometry = Geometry(q.shape[-1] ** -0.5, right=0)
    out, lse = reference.forward(*heads.quantize(q, k, v, None, hadamard=False), geometry)
    return [out, *reference.backward(grad_out, q, k, v, out, lse, geometry)]


def truth(inputs: Inputs) -> list[Tensor]:
    """In float64, of the bf16 inputs."""
    compute = through_autograd(lambda q, k, v: attention(q, k, v, backend="reference", causal=True))
    return compute(*(x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out)))


def errors(exact: list[Tensor], ours: list[Tensor]) -> dict[str, float]:
    """RMSE, and SQNR in dB, of the output and the gradients."""
    row: dict[str, float] = {}
    for name, a, b in zip(NAMES, exact, ours, strict=True):
        row[f"{name}_rmse"] = (a - b.double()).square().mean().sqrt().item()
        row[f"{name}_sqnr_db"] = sqnr_db(a, b)
    return row
