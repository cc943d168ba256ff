"""Share of a model's products that is computed in FP8, and which are large enough to gain: from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8_ds.nn.plan.plan import Plan, kind_of, other_weights

MIN_NUMEL = 1 << 22
"""Elements of the smallest weight, on one rank, that takes less time in FP8 than in bf16, with casts and transposes.

On an H200, with 8,192 tokens, bf16's time over FP8's is 1.01 to 1.26 for weights of 1024 x 4096 and 2048 x 2048, by the
recipe (`tensorwise`: 1.09 and 1.18), and 0.72 to 1.04 for those of 768 x 3072. Measured was one linear, forward and
backward, on the device; source: benchmarks/results/2026-11-23-layer-table.md. Fewer tokens move the tie to larger
weights, a fused producer or a shared input to smaller ones.
"""


@dataclass(frozen=True)
class Product:
    """A matrix that tokens are multiplied with: its name, the class of its module, its shape, FLOPs of a token in the
    forward, whether they are in FP8, and why or why not."""

    fqn: str
    kind: str
    shape: tuple[int, ...]
    flops: int
    in_fp8: bool
    reason: str


def products(model: nn.Module, plan: Plan) -> list[Product]:
    """Return the products of all modules but embeddings, which look up rows, in module order, with their `plan`."""
    planned = {layer.fqn: layer for layer in plan.layers}
    others: dict[str, list[Product]] = {}
    for fqn, module, name, p in other_weights(model):
        share = _share_of_experts(module, p.shape[0]) if p.dim() == 3 else 1.0
        flops, reason = round(2 * p.numel() * share), f"a {kind_of(module)}, not an nn.Linear"
        product = Product(f"{fqn}.{name}", type(module).__name__, tuple(p.shape), flops, False, reason)
        others.setdefault(fqn, []).append(product)
    found: list[Product] = []
    for fqn, module in model.named_modules():
        rows = [planned[name] for name in (fqn, *(f"{fqn}.{name}" for name in module._parameters)) if name in planned]
        for row in rows:
            share = _share_of_experts(module, row.num_experts) if row.num_experts else 1.0
            flops = round(2 * row.numel * share)
            found.append(Product(row.fqn, type(module).__name__, row.shape, flops, row.converted, row.reason))
        found.extend(others.get(fqn, ()))
    return found


def _share_of_experts(module: nn.Module, num_experts: int) -> float:
    """Return the share of experts [experts, rows, columns] that a token visits; 1 if the module does not say."""
    for place in (module, getattr(module, "config", None)):
        for name in ("num_experts_per_tok", "top_k"):
            value = getattr(place, name, None)
            if isinstance(value, int) and value:
                return min(1.0, value / num_experts)
    return 1.0


def attention_flops(model: nn.Module, seq_len: int) -> int:
    """Return the FLOPs of scores and their sums for a token in the forward; if causal, for half of all pairs."""
    total = 0
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(module, "is_causal", None), bool) and hasattr(config, "num_attention_heads"):
            heads = config.num_attention_heads
            dim = getattr(module, "head_dim", None) or config.hidden_size // heads
            total += 2 * 2 * seq_len * heads * dim // (2 if module.is_causal else 1)
    return total
