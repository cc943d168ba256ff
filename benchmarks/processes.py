"""How processes end: run_or_end is for a command that may hang, leave for a rank that is done."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

ENDED = 124
"""Exit status of what had to be ended, as of coreutils' timeout."""


def run_or_end(command: Sequence[str], limit: float, *, grace: float = 10.0, **options: Any) -> int:
    """Exit status of `command`; `ENDED` if it and what it started had to be ended.

    Launchers are asked first: torchrun's ranks are in sessions of their own, and only it knows them.

    Args:
        limit: seconds until it is ended.
        grace: seconds from SIGTERM to SIGKILL, both to its whole process group.
        options: of `subprocess.Popen`.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(seconds)
        return ENDED


def leave() -> NoReturn:
    """This process ends with status 0: its process groups are destroyed, its output is written, nothing else is done.

    Python's own way out may abort (-6, "terminate called without an active exception"): a thread of gloo's that lets go
    of a tensor wants the interpreter lock, and Python unwinds threads that want it while it closes down. Functions of
    `atexit` are not called.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
