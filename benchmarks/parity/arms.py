"""Arms of the parity studies: the "fp8" block of each; rivals and controls without one."""

from __future__ import annotations

from typing import Any

from fp8_ds.parity.arms import CHANGES, changed
from parity.emulated import EMULATED

DEFAULT: dict[str, Any] = {"enabled": True}
LAST_IN_BF16 = {"schedule": {"bf16_last_fraction": 0.1}}
LAST_5_IN_BF16 = {"schedule": {"bf16_last_fraction": 0.05}}
LAST_3_IN_BF16 = {"schedule": {"bf16_last_fraction": 0.03}}
E4M3_GRADIENTS = {"linear": {"grad_dtype": "e4m3"}}
ENDS = changed(DEFAULT, CHANGES["ends-in-bf16"])
E4M11 = changed(DEFAULT, CHANGES["e4m11"])


KEPT = {
    "last": ["blocks.-1."],
    "first": ["blocks.0."],
    "last-down": ["blocks.-1.down"],
    "last-mlp": ["blocks.-1.up", "blocks.-1.down"],
    "last-attention": ["blocks.-1.qkv", "blocks.-1.out"],
    "three-attentions": [f"blocks.-{k}.{linear}" for k in (1, 2, 3) for linear in ("qkv", "out")],
    "attention": [".qkv", ".out"],
    "first-up": ["blocks.0.up"],
    "two": ["blocks.0.qkv", "blocks.-1.down"],
    "three": ["blocks.0.qkv", "blocks.0.up", "blocks.-1.down"],
}
"""Linears of the GPT that stay in bf16, beside the head, where not all of the first and last block does."""


def _kept(name: str, block: dict[str, Any] = DEFAULT) -> dict[str, Any]:
    """`block` with E4M3 gradients and these linears in bf16."""
    return changed(block, {"linear": {"grad_dtype": "e4m3", "filter_fqns": ["lm_head", *KEPT[name]]}})


def _linears(**keys: str) -> dict[str, Any]:
    """e4m11 with these keys of "linear"."""
    return changed(E4M11, {"linear": keys})


FASTEST = changed(_linears(grad_dtype="e4m3", fast_accumulation="output_and_grad_input"), CHANGES["delayed"])


ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "fp8": DEFAULT,
    "delayed": changed(DEFAULT, CHANGES["delayed"]),
    "rowwise": changed(DEFAULT, CHANGES["rowwise"]),
    "gw_hp": changed(DEFAULT, CHANGES["rowwise_with_gw_hp"]),
    "blockwise": changed(DEFAULT, CHANGES["blockwise"]),
    "fp32-master": changed(DEFAULT, CHANGES["fp32-master"]),
    "e4m19": changed(DEFAULT, CHANGES["e4m19"]),
    "e4m11": E4M11,
    "e4m11-nearest": E4M11,
    "e4m11-delayed": changed(E4M11, CHANGES["delayed"]),
    "e4m11-delayed-e4m3-fast-input": FASTEST,
    "fp8-e4m3": changed(DEFAULT, E4M3_GRADIENTS),
    "fp8-ends": ENDS,
    "fp8-ends-e4m3": changed(ENDS, E4M3_GRADIENTS),
    "e4m11-ends-e4m3-fast-input": changed(
        changed(changed(ENDS, E4M3_GRADIENTS), CHANGES["e4m11"]),
        {"linear": {"fast_accumulation": "output_and_grad_input"}},
    ),
    "e4m11-e4m3-fast-input-last-attention": _kept(
        "last-attention", _linears(fast_accumulation="output_and_grad_input")
    ),
    **{f"fp8-e4m3-{name}": _kept(name) for name in KEPT},
    "fp8-e4m3-fast": changed(DEFAULT, {"linear": {"grad_dtype": "e4m3", "fast_accumulation": "all"}}),
    "rowwise-e4m3": changed(changed(DEFAULT, CHANGES["rowwise"]), E4M3_GRADIENTS),
    "gw_hp-e4m3": changed(changed(DEFAULT, CHANGES["rowwise_with_gw_hp"]), E4M3_GRADIENTS),
    "e4m11-e4m3": _linears(grad_dtype="e4m3"),
    "e4m11-e4m3-fast-input": _linears(grad_dtype="e4m3", fast_accumulation="output_and_grad_input"),
    "e4m11-fast": _linears(fast_accumulation="all"),
    "e4m11-fast-e4m3": _linears(fast_accumulation="all", grad_dtype="e4m3"),
    "fp8-bf16-last": changed(DEFAULT, LAST_IN_BF16),
    "fp8-bf16-last5": changed(DEFAULT, LAST_5_IN_BF16),
    "fp8-ends-e4m3-bf16-last": changed(changed(ENDS, E4M3_GRADIENTS), LAST_IN_BF16),
    "e4m11-bf16-last": changed(E4M11, LAST_IN_BF16),
    "e4m11-delayed-e4m3-fast-input-bf16-last3": changed(FASTEST, LAST_3_IN_BF16),
    "e4m11-delayed-e4m3-fast-input-bf16-last": changed(FASTEST, LAST_IN_BF16),
    "torchao": None,
    "bf16-nearest": None,
    **dict.fromkeys(EMULATED),
}
"""By name. "fp8" is the default setting: recipe tensorwise, fp32 states. "-nearest": without stochastic rounding, the
controls of regime 2. "-e4m3": gradients are E4M3. "-ends": the first and the last block stay bf16. "-fast": all
products accumulate fast, "-fast-input" those of the gradient of the input only, beside the output's. Those of
`EMULATED` have no block: stock, with parts of FP8's rounding."""
TRUNKS = {
    "fp8-bf16-last": "fp8",
    "fp8-bf16-last5": "fp8",
    "fp8-ends-e4m3-bf16-last": "fp8-ends-e4m3",
    "e4m11-bf16-last": "e4m11",
    "e4m11-delayed-e4m3-fast-input-bf16-last3": "e4m11-delayed-e4m3-fast-input",
    "e4m11-delayed-e4m3-fast-input-bf16-last": "e4m11-delayed-e4m3-fast-input",
}
"""Of arms whose last tenth of the steps, or 5 or 3 %, computes in bf16: that which trains the same bits until then."""
SCHEDULED = tuple(TRUNKS)
"""Only where they are asked for by name."""
RECIPES = ("delayed", "rowwise", "gw_hp", "blockwise")
"""Beside "fp8", which is tensorwise; states as in stock."""
STATES = ("fp32-master", "e4m19", "e4m11")
"""FP8 moments and each format of masters; recipe tensorwise."""
VARIANTS = {
    "fp8-e4m3": "fp8",
    "fp8-ends": "fp8",
    "fp8-ends-e4m3": "fp8-e4m3",
    "rowwise-e4m3": "rowwise",
    "gw_hp-e4m3": "gw_hp",
    "e4m11-ends-e4m3-fast-input": "fp8-ends-e4m3",
    "e4m11-e4m3-fast-input-last-attention": "e4m11-ends-e4m3-fast-input",
    "e4m11-delayed-e4m3-fast-input": "e4m11-delayed",
}
"""Recipes with E4M3 gradients ("blockwise" has no other) or with ends in bf16, and what they are compared with beside
stock."""
EXPLORED = {f"fp8-e4m3-{name}": "fp8-e4m3" for name in (*KEPT, "fast")}
"""As `VARIANTS`, with no claim that has bounds."""
OF_LINEARS = ("e4m11-e4m3", "e4m11-e4m3-fast-input", "e4m11-fast-e4m3", "e4m11-fast", "e4m11-delayed")
"""What linears may do for speed or precision, beside "e4m11" with the same states."""
WITHOUT_DEEPSPEED = ("torchao", "bf16-nearest")
