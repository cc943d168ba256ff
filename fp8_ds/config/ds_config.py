"""DeepSpeed's configuration as DeepSpeed reads it: its spellings, its idea of true, its defaults."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from fp8_ds.errors import ConfigError

Config = Mapping[str, Any]
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
"""Names that DeepSpeed takes for float32 in "data_types"."""


def block_of(config: Config, *path: str) -> Mapping[str, Any]:
    for key in path:
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return {}
    return config


def zero_value(config: Config, *names: str) -> Any:
    """Return the value of the first spelling in `names` that `zero_optimization` has."""
    block = block_of(config, "zero_optimization")
    return next((block[name] for name in names if name in block), None)


def bf16_block(config: Config) -> Mapping[str, Any]:
    """Return the bf16 block; "bfloat16" is its old name, read only where "bf16" is absent."""
    return block_of(config, "bf16" if config.get("bf16") is not None else "bfloat16")


def is_on(value: Any) -> bool:
    """Whether DeepSpeed's pydantic models read `value` as true. "auto" that nobody filled in is the default, false."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "t", "yes", "y", "on", "1")
    return bool(value)


def number(value: Any, default: int) -> int:
    """Read `value` as DeepSpeed does; return the default for null, "auto" and values that its own check will refuse."""
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def zero_stage(config: Config) -> int:
    """Return the ZeRO stage that DeepSpeed will use, 0 for none. `"zero_optimization": true` is an old stage 1."""
    if config.get("zero_optimization") is True:
        return 1
    return number(zero_value(config, "stage"), 0)


def gradient_clipping(config: Config) -> float:
    """Return the norm that DeepSpeed will clip at, 0 for none. Without the key it is the version's default; "auto" is
    1.0, which Trainer and Accelerate fill in."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    value = config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)
    return float(value) if isinstance(value, (int, float)) else 1.0


def filled_in(config: Config) -> Config:
    """Return `config` with bf16 on where it is "auto", as Trainer and Accelerate fill that in for a run in bf16."""
    for key in ("bf16", "bfloat16"):
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("enabled") == "auto":
            return {**config, key: {**block, "enabled": True}}
    return config


def parsed(config: Config, num_ranks: int | None = None) -> Any:
    """Return the `DeepSpeedConfig` that DeepSpeed's own parser makes of a configuration.

    Keys with "auto" at the top level are left out, and such a batch size is 1: Trainer and Accelerate fill them in.

    Args:
        config: DeepSpeed's configuration, as `json.load` returns it.
        num_ranks: ranks of the run; None: as many as its batch sizes fit.

    Raises:
        ConfigError: DeepSpeed refuses it; the message has its words, and the key if one alone is at fault.
    """
    left_out = {key for key, value in config.items() if value == "auto" or (value is None and key in BATCH_SIZES)}
    given = {key: value for key, value in config.items() if key not in left_out | {"fp8"}}
    if not any(key in given for key in BATCH_SIZES) and "auto" in map(config.get, BATCH_SIZES):
        given[BATCH_SIZES[1]] = 1
    try:
        read = _config_class(num_ranks)(copy.deepcopy(given))
        assert not isinstance(read.gradient_clipping, str), f"gradient_clipping is {read.gradient_clipping!r}, a string"
    except Exception as error:  # whatever its parser raises: assertions, pydantic's, TypeError, AttributeError
        raise ConfigError(f"{_words(given, error)}. Correct it.") from error
    return read


def _config_class(num_ranks: int | None) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    class OnRanks(DeepSpeedConfig):
        """DeepSpeed's configuration with the number of ranks, which it would ask of a process group."""

        def _configure_train_batch_size(self) -> None:
            ranks = num_ranks
            if ranks is None:
                steps = self.gradient_accumulation_steps or 1
                ranks = max((self.train_batch_size or 1) // ((self.train_micro_batch_size_per_gpu or 1) * steps), 1)
            elif ranks % (size := max(self.tensor_parallel_config.autotp_size, 1)):
                raise ValueError(f"{ranks} ranks are no multiple of tensor_parallel.autotp_size {size}")
            else:
                ranks //= size
            self.world_size = ranks
            super()._configure_train_batch_size()

    return OnRanks


def _words(config: Config, error: Exception) -> str:
    """Return the message for an error of DeepSpeed's parser: the first key that alone makes it stop, and its words."""
    for key, value in config.items():
        try:
            _config_class(None)({BATCH_SIZES[1]: 1, key: copy.deepcopy(value)})
        except Exception as its_own:
            found: Any = getattr(its_own, "errors", list)()  # of pydantic
            path = ".".join(map(str, (key, *(found[0]["loc"] if found else ()))))
            value = found[0]["input"] if found else value
            said = found[0]["msg"] if found else f"{type(its_own).__name__}: {its_own}"
            return f"{path}: expected what DeepSpeed reads, got {json.dumps(value, default=str)}. It says: {said}"
    return f"configuration: expected one that DeepSpeed starts with, got one that it refuses. It says: {error}"


def linear_in_training(config: Config) -> Callable[..., Any]:
    """Return `torch.nn.functional.linear` as it will be once the engine is built.

    ZeRO-3 replaces it the first time by its own function, even if a user has replaced it before.
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
    """Whether DeepSpeed will build an engine that trains, with the optimizer `given` to initialize or the
    configuration's; else FP8 is off."""
    return given is not None or bool(block_of(config, "optimizer").get("type"))
