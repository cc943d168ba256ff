"""Resources of this host that DeepSpeed uses, found without an engine: CUDA or the CPU, GPUs, and a port."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import suppress

from fp8_ds.errors import ConfigError

_PORTS = range(10_000, 32_768)


def uses_cuda() -> bool:
    """Whether DeepSpeed computes on CUDA, here and in processes started from here.

    DS_ACCELERATOR decides, and without it whether torch has CUDA, as in deepspeed 0.19.8 (real_accelerator.py). torch
    alone is no answer, because users set DS_ACCELERATOR=cpu on machines with GPUs. Code within a run asks
    `get_accelerator()`, whose choice is final in a process and needs deepspeed, which `fp8-ds doctor` may not have.
    """
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def num_gpus() -> int:
    """Return how many GPUs DeepSpeed has for ranks; 0 where it computes on the CPU."""
    import torch

    return torch.cuda.device_count() if uses_cuda() else 0


def which_gpus(number: int) -> list[str]:
    """Return launcher arguments for `number` ranks of this host, on GPUs that CUDA_VISIBLE_DEVICES names, if any.

    Given a number only, the launcher ignores CUDA_VISIBLE_DEVICES, with a line in its log, and takes the host's first
    GPUs, whoever computes there (0.19.8, launcher/runner.py line 453). It accepts numbers only: where GPUs are named by
    UUID, it chooses.

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


def free_port() -> int:
    """Return a TCP port of this host at which nobody listens, for the store of a process group.

    Ranks listen at it only once they have imported torch, seconds later. A port of the system's choice (bind to 0) can
    by then belong to a connection, and the start fails with EADDRINUSE; so this one is below those that Linux and IANA
    set aside for connections.

    Raises:
        OSError: a hundred such ports are all in use.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):  # a program's seed would give all its processes the same
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"expected a free port among {_PORTS[0]} to {_PORTS[-1]}, got none in 100 tries")
