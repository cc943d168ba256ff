"""run_or_end: a command that may hang, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

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
