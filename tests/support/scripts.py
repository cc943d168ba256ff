"""Scripts in processes that are forked from one that has torch and DeepSpeed: their import is most of a short run."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import HANG
from support.ranks import IMPORTED_ONCE


def start_script(
    script: Path | str, arguments: Sequence[object], env: Mapping[str, str], log: Path | str, cwd: Path | str = "."
) -> BaseProcess:
    """Start `python script *arguments` with this environment, but for what modules read of it at their import.

    Args:
        log: to which its output is appended.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    argv = [str(script), *map(str, arguments)]
    process: BaseProcess = context.Process(target=_run, args=(argv, dict(env), str(log), str(Path(cwd).resolve())))
    process.start()
    return process


def run_script(script: Path, arguments: Sequence[object], env: Mapping[str, str], log: Path) -> str:
    """Output of `start_script` at its end.

    Raises:
        AssertionError: it has failed or hung; with the end of its output.
    """
    code = _ended(start_script(script, arguments, env, log), HANG)
    output = log.read_text()
    assert code == 0, output[-6000:]
    return output


def run_command(command: Sequence[str], limit: float, *, grace: float = 10.0, **options: Any) -> int:
    """`processes.run_or_end` of benchmarks/ for a command that is a script of Python's, or -m and a module, its output
    in a file."""
    return _ended(start_script(command[1], command[2:], options["env"], options["stdout"].name), limit)


def _ended(process: BaseProcess, limit: float) -> int:
    """Exit status, negative of what takes longer than `limit` seconds and is killed."""
    try:
        process.join(limit)
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(argv: list[str], env: dict[str, str], log: str, cwd: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")
