"""Kernels in Triton's interpreter, in a process of their own, where this module is a plugin of pytest too."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8_ds.testing import HANG


def run_interpreted(tests: Sequence[Path], *more: str) -> None:
    """All tests of these files pass where Triton interprets; it decides so at its import, and the caller may have
    done that.

    None of the caller's plugins that would write reports or need its options take part.

    Args:
        tests: the files, all of them in one process, whose start takes seconds.
        more: options of pytest.

    Raises:
        AssertionError: one fails or is skipped, or there is none; with the end of the output.
    """
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", __name__]
    command = [sys.executable, "-m", "pytest", "-q", *options, *more, *map(str, tests)]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False)
    if result.returncode or " passed" not in result.stdout or "skipped" in result.stdout:
        raise AssertionError(result.stdout[-6000:])


def pytest_configure() -> None:
    """Half the time of the interpreter, which for every call of a function within a kernel goes through all of
    `triton.language` to replace what is replaced already, and for every integer sum computes in 64 bits whether it
    overflows, to say so in debug mode alone.

    Source: `InterpretedFunction.__call__` and `GridExecutor` of triton 3.9, runtime/interpreter.py.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    replaced: set[int] = set()
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()  # a launch undoes what it has replaced
        return run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        if id(names) not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(id(names))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call
