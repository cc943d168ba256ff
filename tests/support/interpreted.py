"""Kernels in Triton's interpreter, in a process of their own, where this module is a plugin of pytest too."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import HANG


def run_interpreted(tests: Sequence[Path], *more: str) -> tuple[int, str]:
    """Exit status and output of pytest where Triton interprets; it decides so at its import, and the caller may have
    done that.

    None of the caller's plugins that would write reports or need its options take part.

    Args:
        tests: the files, all of them in one process, whose start takes seconds.
        more: options of pytest.
    """
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", __name__]
    command = [sys.executable, "-m", "pytest", "-q", *options, *more, *map(str, tests)]
    # A plugin is imported before pyproject.toml's paths are there.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False)
    return result.returncode, result.stdout


def pytest_configure() -> None:
    """Less than half the time of the interpreter, which for every call of a function in a kernel goes through all of
    `triton.language` to replace what is replaced already, for every integer sum computes in 64 bits whether it
    overflows, to say so in debug mode alone, and for every result makes its type and the tuples of its shape anew.

    Source: `InterpretedFunction.__call__` and `GridExecutor` of triton 3.9, runtime/interpreter.py; `block_type` and
    `tensor`, language/core.py.
    """
    from triton.language import core
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

    init_type, init_tensor, np_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle)

    def dtype_of(tt_dtype: Any) -> Any:
        if tt_dtype.name not in np_dtypes:
            np_dtypes[tt_dtype.name] = np_dtype(tt_dtype)
        return np_dtypes[tt_dtype.name]

    core.block_type.__init__ = new_type
    core.tensor.__init__ = new_tensor
    interpreter._get_np_dtype = dtype_of
