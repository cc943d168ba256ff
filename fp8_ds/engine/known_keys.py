"""Keys that DeepSpeed reads, and those it no longer does.

It passes over what it does not know in silence, so that a misspelled block is as none; within some blocks it stops.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8_ds.config_errors import COMMENT_SIGNS

if TYPE_CHECKING:
    from pydantic import ValidationError

_NAMES = """
activation_checkpointing aio allgather_size amp autotuning bf16 bfloat16 checkpoint comet comms_logger
communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency data_parallel_size
data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity
expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula
optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients steps_per_print
tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
KNOWN_KEYS = frozenset(_NAMES.split())
"""Of deepspeed 0.18.9, 0.19.0 and 0.19.8 together, `DeepSpeedConfig` and what it calls, `initialize`,
`runtime/zero/config.py`; among them some that 0.19.8 refuses by name."""
_OURS = "fp8"
_TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""Types of DeepSpeed's optimizers that its ZeRO takes without more."""
_ELSEWHERE = {
    "msamp": 'It is MS-AMP\'s: write "fp8" in its place (docs/migrating.md).',
    "float8": 'Did you mean "fp8"?',
}
"""What other FP8 libraries call their block; by its letters the nearest would be "amp", or "bfloat16"."""


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """A line for each top-level key of `config` that neither DeepSpeed nor fp8_ds reads, with the one that is nearest.

    No refusal: DeepSpeed starts all the same, and the user's own code may read the key.
    """
    known = KNOWN_KEYS | {_OURS}
    lines = []
    for key in config:
        if key in known or str(key).startswith(COMMENT_SIGNS):
            continue
        near = difflib.get_close_matches(str(key).lower(), sorted(known), n=1)
        remedy = f'Did you mean "{near[0]}"?' if near else "Correct it, or keep it for code of yours that reads it."
        remedy = _ELSEWHERE.get(str(key).lower(), remedy)
        lines.append(f"{key}: expected a key that DeepSpeed reads, got one that it passes over in silence. {remedy}")
    return lines


def unused_fp8_blocks(config: Mapping[str, Any]) -> list[str]:
    """The lines of `unknown_keys` on other FP8 libraries' blocks, which a run without one of ours has for nothing."""
    return unknown_keys({key: value for key, value in config.items() if str(key).lower() in _ELSEWHERE})


def removed_key(config: Mapping[str, Any]) -> str | None:
    """What the installed DeepSpeed says, and stops with, of a key that it once had; None: there is no such key."""
    from deepspeed.runtime import config as theirs

    reject = getattr(theirs, "_reject_removed_config_keys", None)  # 0.19.8 and later
    try:
        if reject is not None:
            reject(dict(config))
    except theirs.DeepSpeedConfigError as error:
        return str(error)
    return None


def refused_optimizer(config: Mapping[str, Any]) -> str | None:
    """Why the installed DeepSpeed stops at "optimizer.type": it has no such optimizer, or not with ZeRO. None: it does
    not. Of what is not `judgement.malformed`.

    Source: `DeepSpeedEngine._is_supported_optimizer` and `is_zero_supported_optimizer` of deepspeed 0.19.8.
    """
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind = (config.get("optimizer") or {}).get("type")
    if kind is None:
        return None
    theirs = {name: name for name in DEEPSPEED_OPTIMIZERS}
    torchs = {name.lower(): name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    if kind.lower() not in theirs and kind not in torchs.values():
        near = difflib.get_close_matches(kind.lower(), known := {**torchs, **theirs}, n=1)
        remedy = f'Did you mean "{known[near[0]]}"?' if near else 'Write "AdamW".'
        return f'optimizer.type: expected one of DeepSpeed\'s or of torch.optim, got "{kind}". {remedy}'
    if kind.lower() not in _TESTED_WITH_ZERO and not config.get("zero_allow_untested_optimizer"):
        return (
            f'optimizer.type: expected one that DeepSpeed has tested with ZeRO, got "{kind}". Use "AdamW", or set '
            '"zero_allow_untested_optimizer": true.'
        )
    return None


def unread_key(config: Mapping[str, Any]) -> str | None:
    """What the installed DeepSpeed stops with in the blocks of ZeRO and bf16: a key that it does not know, with the one
    that is nearest, or a value that it cannot read. None: there is none. Of what is not `judgement.malformed`.
    """
    from deepspeed.runtime import config as theirs
    from pydantic import ValidationError

    if removed_key(config) is not None:  # which it says in better words
        return None
    readers = {"zero_optimization": theirs.get_zero_config}
    readers |= dict.fromkeys(("bf16", "bfloat16"), theirs.get_bfloat16_config)
    for key, read in readers.items():
        if not isinstance(config.get(key), Mapping):
            continue
        try:
            read({key: config[key]})
        except ValidationError as error:
            return _unread(key, error)
        except TypeError as error:  # of a validator of DeepSpeed's own, which pydantic lets through
            return f"{key}: expected what DeepSpeed can read, got {json.dumps(config[key])}. It says: {error}."
    return None


def _unread(block: str, error: ValidationError) -> str:
    """The first of what pydantic has found."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    first = error.errors()[0]
    path = ".".join(map(str, (block, *first["loc"])))
    if first["type"] != "extra_forbidden":
        return f"{path}: expected what DeepSpeed can read, got {first['input']!r}. It says: {first['msg']}."
    fields = sorted(DeepSpeedZeroConfig.model_fields) if block == "zero_optimization" and len(first["loc"]) == 1 else []
    near = difflib.get_close_matches(str(first["loc"][-1]), fields or ["enabled"], n=1)
    remedy = f'Did you mean "{near[0]}"?' if near else "Correct or remove it."
    return f"{path}: expected a key that DeepSpeed reads, got one that it stops at. {remedy}"
