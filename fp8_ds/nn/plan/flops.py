"""Products that are large enough to gain in FP8, and the share of a model's that is in it: from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8_ds.nn.plan.plan import Plan, kind_of, other_weights

MIN_MACS = {"compiled": 10_000_000_000, "eager": 137_000_000_000}
"""Multiply-adds of the smallest product, tokens x in x out, from which a linear takes less time in FP8 than in bf16.

Compiled it is the GPU's time: from there on bf16's is 1.01 to 1.90 times FP8's. In eager mode an FP8 linear takes the
host near 1 ms, whatever its size, and the GPU must be busy with bf16 for as long: 1.00 to 1.85 times, but for one cell,
0.94, at the limit itself. Measured on an H200 were the forward and backward of one linear with recipes `delayed` and
`tensorwise`, 105 sizes; source: benchmarks/results/2026-11-29-linear-sizes.md. A fused producer or a shared input moves
the tie to smaller ones.
"""
MIN_MEAN_MACS = 100_000_000_000
"""Multiply-adds that the FP8 linears of a compiled model have in the mean, below which the host is the limit.

An FP8 linear adds operators to a graph, which the host launches one by one; a GPU that is busy with larger linears
hides that, so a model decides, not a linear. Six models of width 1024 and 2048 with 2e10 to 7e10 in the mean took 1.04
to 1.55 times as long a step as with all in bf16; two of them without their smaller linears, with 9e10, 0.80 and 1.22
times. One of width 2048 with 1.0e11 is 1.13 times as fast as in its bf16 steps, five of width 4096, 2.5e11 and more,
1.40 to 1.52 times. In ZeRO-3, where each layer is a graph, two with 1.0e11 and one with 1.3e11 take 1.23 to 1.29 times
as long in FP8 on one GPU; on several, FP8 halves what they wait for. On an H200 with 8,192 tokens; source:
benchmarks/results/2026-11-30-out-of-box.md, its last table for the first."""
MIN_CHECKPOINTED_MACS = 1_000_000_000_000
"""Multiply-adds of experts in FP8 in a compiled model's checkpointed layers, which then run in eager as a whole.

torch.compile makes a graph of a checkpointed layer or none, and experts in FP8 end a graph. On an H200 with 8,192
tokens Mixtral of width 2048 (3.8e11) took 102.5 ms a step so, where DeepSpeed's eager bf16 took 95.0, and with all in
bf16 47.7, where that took 117. Width 4096 (1.9e12) is not measured in this mode; in eager its experts gain. Sources:
benchmarks/results/2026-11-30-layers-in-eager.md, 2026-11-30-out-of-box.md."""
MIN_FEATURES = 1200
"""Twice the least in * out / (in + out) that gains, whatever the number of tokens: the width of a square linear.

What is cast grows as in + out, what is multiplied as in * out. Source as above: linears of 1024 x 1024 and 2048 x 512
never gain with `tensorwise`, 768 x 3072 do."""


@dataclass(frozen=True)
class SizeRule:
    """Least sizes of linears that are in FP8: multiply-adds of a product, features if it were square, and multiply-adds
    in the mean of all of a model's."""

    macs: int
    features: int = 0
    mean_macs: int = 0

    @classmethod
    def of(cls, min_size: int | None, *, is_compiled: bool) -> SizeRule:
        """Return the rule that `linear.min_size` asks for; None: the measured one."""
        if min_size is not None:
            return cls(min_size)
        if is_compiled:
            return cls(MIN_MACS["compiled"], MIN_FEATURES, MIN_MEAN_MACS)
        return cls(MIN_MACS["eager"], MIN_FEATURES)

    @classmethod
    def of_experts(cls, min_size: int | None, *, ends_checkpoint: bool) -> SizeRule:
        """Return the rule of experts, of which no graph has those in FP8.

        Args:
            ends_checkpoint: whether their layer is checkpointed, and would be a graph without them.
        """
        if min_size is not None:
            return cls(min_size)
        return cls(MIN_CHECKPOINTED_MACS if ends_checkpoint else MIN_MACS["eager"], MIN_FEATURES)

    def too_small(self, sizes: Mapping[str, tuple[float, int, int]]) -> set[str]:
        """Return the linears of a model that stay bf16.

        Args:
            sizes: by name, tokens on a rank, in_features and out_features of all that may be in FP8.
        """
        macs = {name: math.prod(size) for name, size in sizes.items() if self.gains(*size)}
        while macs and sum(macs.values()) < self.mean_macs * len(macs):
            least = min(macs.values())
            macs = {name: one for name, one in macs.items() if one > least}  # alike in all layers, whose graph is one
        return sizes.keys() - macs.keys()

    def gains(self, num_tokens: float, in_features: int, out_features: int) -> bool:
        """Whether a linear gains in FP8 with so many tokens on a rank; of experts, which are computed together, a token
        counts once for each that it visits."""
        is_wide = 2 * in_features * out_features >= self.features * (in_features + out_features)
        return is_wide and num_tokens * in_features * out_features >= self.macs

    def least_square(self, num_tokens: int) -> int:
        """Return the width of the smallest square linear that gains."""
        return max(self.features, math.isqrt(max(math.ceil(self.macs / num_tokens) - 1, 0)) + 1)


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
        share = share_of_experts(module, p.shape[0]) if p.dim() == 3 else 1.0
        flops, reason = round(2 * p.numel() * share), f"a {kind_of(module)}, not an nn.Linear"
        product = Product(f"{fqn}.{name}", type(module).__name__, tuple(p.shape), flops, False, reason)
        others.setdefault(fqn, []).append(product)
    found: list[Product] = []
    for fqn, module in model.named_modules():
        rows = [planned[name] for name in (fqn, *(f"{fqn}.{name}" for name in module._parameters)) if name in planned]
        for row in rows:
            share = share_of_experts(module, row.num_experts) if row.num_experts else 1.0
            flops = round(2 * row.numel * share)
            found.append(Product(row.fqn, type(module).__name__, row.shape, flops, row.converted, row.reason))
        found.extend(others.get(fqn, ()))
    return found


def share_of_experts(module: nn.Module, num_experts: int) -> float:
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
