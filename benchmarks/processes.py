"""Processes of a benchmark: commands that may hang (run_or_end, run_logged), and ranks (run_on_ranks, leave)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results_io import ROOT, without_folders

ENDED = 124
"""Exit status of what had to be ended, as of coreutils' timeout."""
ERROR_CHARS = 3000


def run_or_end(command: Sequence[str], limit: float, *, grace: float = 10.0, **options: Any) -> int:
    """Exit status of `command`; `ENDED` if it and what it started had to be ended.

    Args:
        limit, grace: of `wait_or_end`.
        options: of `subprocess.Popen`.
    """
    return wait_or_end(subprocess.Popen(command, start_new_session=True, **options), limit, grace=grace)


def wait_or_end(process: subprocess.Popen[Any], limit: float, *, grace: float = 10.0) -> int:
    """Exit status of a process in a session of its own; `ENDED` if it and what it started had to be ended.

    Launchers are asked first: torchrun's ranks are in sessions of their own, and only it knows them.

    Args:
        limit: seconds until it is ended.
        grace: seconds from SIGTERM to SIGKILL, both to its whole process group.
    """
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


def run_on_ranks(work: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """What `work(device, *args)` returns on rank 0 of `num_ranks` new processes of this host, each with a GPU of its
    own, or with gloo on CPU; they are the default process group.

    Args:
        work: of a module's top level, its arguments something that pickle takes, and its result something of JSON's.

    Raises:
        mp.ProcessRaisedException: `work` raised on a rank; with its traceback.
        mp.ProcessExitedException: a rank's process ended before `work` did.
    """
    sys.path.insert(0, str(ROOT))  # the new processes have it, too
    from fp8_ds.host import free_port

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        mp.spawn(_run_rank, (num_ranks, free_port(), result, work, args), nprocs=num_ranks)
        return json.loads(result.read_text())


def _run_rank(
    rank: int, num_ranks: int, port: int, result: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    from fp8_ds.host import uses_cuda

    on_cuda = uses_cuda()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    found = work(device, *args)
    if rank == 0:
        result.write_text(json.dumps(found))
    leave()
