"""What Trainer fills into a DeepSpeed configuration: numbers for "auto", and an optimizer where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADAM: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_TOP: dict[str, Any] = {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
"""Both: TrainingArguments' defaults, huggingface/transformers 5.24 training_args.py; clipping is max_grad_norm."""
OPTION_OF = {"train_micro_batch_size_per_gpu": "--micro-batch", "optimizer.params.lr": "--lr"}
"""What has no default that anybody trains with."""


def filled(config: Mapping[str, Any], micro_batch: int | None, lr: float | None) -> tuple[dict[str, Any], list[str]]:
    """A configuration that DeepSpeed can start with, as far as these fill it; and what nobody has named, "key value".

    Args:
        config: of which `judgement.malformed` says nothing. It stays as it is.
        micro_batch: sequences a rank, instead of the configuration's; None: it has them, or "auto" stays.
        lr: the optimizer's, instead of the configuration's; without one there it is AdamW. None: as for `micro_batch`.
    """
    found, said = dict(config), []
    if micro_batch is not None:
        found["train_micro_batch_size_per_gpu"] = micro_batch
    if found.get("train_batch_size") == "auto":
        del found["train_batch_size"]  # the product of the others
    for key, value in _TOP.items():
        if found.get(key) == "auto":
            found[key] = value
            said.append(f"{key} {value}")
    for key, value in (("bf16", True), ("bfloat16", True), ("fp16", False)):
        block = found.get(key)
        if isinstance(block, Mapping) and block.get("enabled") == "auto":
            found[key] = {**block, "enabled": value}
            said.append(f"{key}.enabled {str(value).lower()}")
    if lr is not None and "optimizer" not in found:
        found["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(ADAM, "auto")}
        said.append("optimizer AdamW")
    if "optimizer" in found:
        params = found["optimizer"].get("params")
        params = dict(params) if isinstance(params, Mapping) else {}
        if lr is not None:
            params["lr"] = lr
        for key, value in ADAM.items():
            if params.get(key) == "auto":
                params[key] = value
                said.append(f"{key} {value}")
        if params:
            found["optimizer"] = {**found["optimizer"], "params": params}
    return found, said
