"""What DeepSpeed's launcher is told: which GPUs, and a port."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

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


def free_port() -> int:
    """A TCP port of this host at which nobody listens, for the store of a process group.

    Ranks listen at it only once they have imported torch, seconds later. A port of the system's choice (bind to 0) can
    by then be anybody's connection, and the start fails with EADDRINUSE; so this one is drawn from those that the
    system gives nobody by itself.

    Raises:
        OSError: a hundred ports of those are all in use.
    """
    ports = _ports_of_nobody()
    for port in random.SystemRandom().sample(ports, 100):  # a program's seed would give all its processes the same
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"expected a free port among {ports[0]} to {ports[-1]}, got none in 100 tries")


def _ports_of_nobody(setting: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """Those that need no privilege and that the system does not assign; all of them where it assigns nearly all."""
    first, last = map(int, setting.read_text().split()) if setting.exists() else (49_152, 65_535)  # IANA's
    ports = max(range(10_000, first), range(last + 1, 65_536), key=len)
    return ports if len(ports) >= 1000 else range(10_000, 65_536)
