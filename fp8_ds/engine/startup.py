"""Checks of a start that need no model, for `fp8-ds doctor`, and for `deepspeed.initialize` before any collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8_ds.config import Fp8Config
from fp8_ds.config.ds_config import FP32_NAMES, Config, block_of, gradient_clipping, zero_stage, zero_value
from fp8_ds.config.schedule import check_total
from fp8_ds.engine.refusals import refuse_config, refuse_unread_reports
from fp8_ds.errors import ConfigError

if TYPE_CHECKING:
    import torch


def refuse_settings(fp8: Fp8Config, config: Config) -> None:
    """Refuse a block that contradicts the rest of the configuration, on any machine.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration.
    """
    refuse_config(config)
    fp8.validate_with(config)
    check_total(fp8.schedule, total_steps(config))
    refuse_release(fp8, config)


def refuse_release(fp8: Fp8Config, config: Config) -> None:
    """Refuse settings in `config` that rule out updates in the backward; `retyping.check_release` finds the rest."""
    if not fp8.optimizer.release or not fp8.optimizer.releases(gradient_clipping(config)):
        return
    steps = config.get("gradient_accumulation_steps")
    dtype = block_of(config, "data_types").get("grad_accum_dtype")
    problems = {
        f"gradient_accumulation_steps {steps}": isinstance(steps, int) and steps > 1,
        "managed_gradient_accumulation false": config.get("managed_gradient_accumulation") is False,
        "zero_optimization.contiguous_gradients false": zero_stage(config) < 3
        and zero_value(config, "contiguous_gradients") is False,
        "data_types.grad_accum_dtype torch.float32": str(dtype) in FP32_NAMES,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise no_release(found)


def no_release(found: Sequence[str]) -> ConfigError:
    """Return the error that names what rules out updates during the backward."""
    return ConfigError(
        f"fp8.optimizer.release: expected false with {' and '.join(found)}, got true. Gradients are freed as "
        'soon as they are reduced, one backward per step: remove it, or set "release": false; with '
        '"release_clipping": "exact" and gradient_clipping, reduced shards are held and it may stay.'
    )


def refuse_start(fp8: Fp8Config, config: Config, device: torch.device, rank: int) -> None:
    """Refuse a configuration that no run on `device` can start with, whatever its model.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration, or this machine lacks what it names.
    """
    refuse_settings(fp8, config)
    if fp8.monitor.every:
        refuse_unread_reports(fp8.monitor.sinks, config, rank)
    if fp8.attention.backend is not None:
        from fp8_ds.attention.huggingface import refuse_backend

        refuse_backend(fp8.attention.backend, device)


def total_steps(config: Config) -> object:
    """Return the number of steps that DeepSpeed's learning-rate scheduler is configured with; None if there is none."""
    found: object = block_of(config, "scheduler", "params").get("total_num_steps")
    return found
