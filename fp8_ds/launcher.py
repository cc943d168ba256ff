"""What DeepSpeed's launcher is told."""

from __future__ import annotations

import os

from fp8_ds.device import uses_cuda
from fp8_ds.errors import ConfigError


def which_gpus(number: int) -> list[str]:
    """Arguments that start `number` ranks of this host, on GPUs that CUDA_VISIBLE_DEVICES names, if it names any.

    Told a number only, the launcher ignores CUDA_VISIBLE_DEVICES, with a line in its log, and takes the host's first
    GPUs, whoever computes there (0.19.8, launcher/runner.py line 453). It takes numbers only: where GPUs are named by
    UUID, it chooses as ever.

    Raises:
        ConfigError: fewer GPUs are named.
    """
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not named or not all(name.isdigit() for name in named) or not uses_cuda():
        return ["--num_gpus", str(number)]
    if len(named) < number:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: expected {number} GPUs, got {','.join(named)}. Name more, or ask for fewer."
        )
    return ["--include", "localhost:" + ",".join(named[:number])]
