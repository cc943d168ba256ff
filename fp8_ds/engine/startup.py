"""What a start needs beside its model: `deepspeed.initialize` asks before any collective, `fp8-ds doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fp8_ds.config import Fp8Config
from fp8_ds.engine.host_config import Config, zero_stage
from fp8_ds.engine.refusals import refuse_config, refuse_unread_reports
from fp8_ds.schedule import check_total

if TYPE_CHECKING:
    import torch


def refuse_settings(fp8: Fp8Config, config: Config) -> None:
    """Nothing happens if the block and the rest of the configuration go together, wherever the run is.

    Args:
        fp8: the "fp8" block of `config`.
        config: DeepSpeed's.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration.
    """
    refuse_config(config)
    fp8.check_stage(zero_stage(config))
    check_total(fp8.schedule, total_steps(config))


def refuse_start(fp8: Fp8Config, config: Config, device: torch.device, rank: int) -> None:
    """Nothing happens if a run can start with this configuration, as far as no model is needed to say so.

    Args:
        fp8: the "fp8" block of `config`.
        config: DeepSpeed's.
        device: that the run is on.
        rank: of this process.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration, or what it names cannot be had here.
    """
    refuse_settings(fp8, config)
    if fp8.monitor.every:
        refuse_unread_reports(fp8.monitor.sinks, config, rank)
    if fp8.attention.backend is not None:
        from fp8_ds.attention.huggingface import refuse_backend

        refuse_backend(fp8.attention.backend, device)
    if fp8.activations.cross_entropy == "liger":
        from fp8_ds.engine.cross_entropy import refuse_liger

        refuse_liger(device.type)


def total_steps(config: Config) -> object:
    """What the configuration says of the length of the run to DeepSpeed's learning-rate scheduler; None: nothing."""
    found: object = config
    for key in ("scheduler", "params", "total_num_steps"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
