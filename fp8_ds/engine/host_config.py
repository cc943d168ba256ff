"""DeepSpeed's configuration as DeepSpeed reads it: its spellings, its idea of true, its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
"""What DeepSpeed takes for float32 in "data_types"."""


def block_of(config: Config, *path: str) -> Mapping[str, Any]:
    for key in path:
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return {}
    return config


def zero_value(config: Config, *names: str) -> Any:
    """The first of the spellings `names` that `zero_optimization` has."""
    block = block_of(config, "zero_optimization")
    return next((block[name] for name in names if name in block), None)


def bf16_block(config: Config) -> Mapping[str, Any]:
    """The bf16 block; "bfloat16" is its old name, read only where "bf16" is absent."""
    return block_of(config, "bf16" if config.get("bf16") is not None else "bfloat16")


def is_on(value: Any) -> bool:
    """Whether DeepSpeed's pydantic models read `value` as true. "auto" that nobody filled in is the default, false."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "t", "yes", "y", "on", "1")
    return bool(value)


def number(value: Any, default: int) -> int:
    """`value` as DeepSpeed reads it; the default for null, "auto" and what its own check will refuse."""
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def zero_stage(config: Config) -> int:
    """The ZeRO stage that DeepSpeed will use, 0 for none. `"zero_optimization": true` is an old way to say stage 1."""
    if config.get("zero_optimization") is True:
        return 1
    return number(zero_value(config, "stage"), 0)


def gradient_clipping(config: Config) -> float:
    """The norm that DeepSpeed will clip at, 0 for none: without the key its default, which depends on its version;
    "auto" is 1.0, which Trainer and Accelerate fill in where nothing else is asked of them.
    """
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    value = config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)
    return float(value) if isinstance(value, (int, float)) else 1.0


def linear_in_training(config: Config) -> Callable[..., Any]:
    """`torch.nn.functional.linear` as it will be once the engine is built.

    ZeRO-3 puts a function of its own there, also over one that a user has put there before the first time.
    Source: deepspeed/runtime/zero/partition_parameters.py `_enable_mem_efficient_linear` (0.19.8).
    """
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    linear: Callable[..., Any] = torch.nn.functional.linear
    is_left = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", linear) is not linear
    if zero_stage(config) < 3 or is_left or zero_value(config, "memory_efficient_linear") is False:
        return linear
    replaced: Callable[..., Any] = zero3_linear_wrap
    return replaced


def has_optimizer(config: Config, given: object) -> bool:
    """Whether DeepSpeed will build an engine that trains; without an optimizer it computes only, and FP8 is off.

    Args:
        config: DeepSpeed's.
        given: the optimizer, or what makes one, that `deepspeed.initialize` is handed; None for none.
    """
    return given is not None or bool(block_of(config, "optimizer").get("type"))
