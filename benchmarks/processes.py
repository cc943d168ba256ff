"""How processes end: run_or_end and run_logged are for a command that may hang, leave for a rank that is done."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from results_io import without_folders

ENDED = 124
"""Exit status of what had to be ended, as of coreutils' timeout."""
ERROR_CHARS = 3000


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


def run_logged(
    name: str, command: Sequence[str], limit: float, log: Path | None, **options: Any
) -> tuple[int, str, float]:
    """(exit status, output, seconds) of `run_or_end`; where there is a `log`, it gets the output under `name`, too."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("w") as file:
            code = run_or_end(command, limit, stdout=file, stderr=subprocess.STDOUT, **options)
        text = output.read_text(errors="replace")
    if log is not None:
        with log.open("a") as file:
            file.write(f"===== {name}: exit status {code}\n{text}\n")
    return code, text, round(time.monotonic() - began, 1)


def error_of(code: int, output: str, limit: float) -> str:
    """First line: what is not installed, or the reason, which is a rank's own and not its launcher's; then the end of
    the output."""
    lines = output.splitlines()
    for line in lines:
        if "NOT INSTALLED:" in line:
            return line[line.index("NOT INSTALLED:") :]
    launchers = ("launch.py", "ChildFailedError", "torch/distributed/elastic")
    told = [line for line in lines if re.search(r"(Error|Exception|Exit)\b.*: ", line)]
    told = [line.strip() for line in told if not any(word in line for word in launchers)]
    reason = f"no end after {limit:.0f} s" if code == ENDED else f"exit status {code}"
    return without_folders(f"{reason}: {told[-1] if told else 'no error in its output'}\n{output[-ERROR_CHARS:]}")


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
