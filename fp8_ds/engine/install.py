"""The wrapper of `deepspeed.initialize`, and how to undo it. This module imports neither torch nor deepspeed.

Without `"fp8": {"enabled": true}` in the resolved configuration the wrapper calls DeepSpeed with the same arguments.
With it, our engine classes stand in for DeepSpeed's for the duration of that one call.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fp8_ds.engine.patches import RECORD

_HOST = "deepspeed"


class _DeepSpeedFinder(importlib.abc.MetaPathFinder):
    """Import hook that wraps `deepspeed.initialize` right after deepspeed has been imported, whoever imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOST:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader)
        return spec


def _patch_after(loader: Any) -> None:
    """Patch the host module once `loader` has executed it, and restore the loader."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        original(module)
        _remove_finder()
        _patch(module)

    loader.exec_module = exec_module


def install() -> None:
    """Make `deepspeed.initialize` read the "fp8" block, from now on or from the moment deepspeed is imported.

    Calling it again changes nothing, because several ways of activation may be on at once.
    """
    if is_installed():
        return
    host = sys.modules.get(_HOST)
    if host is not None and hasattr(host, "initialize"):
        _patch(host)
        return
    RECORD.finder = _DeepSpeedFinder()
    sys.meta_path.insert(0, RECORD.finder)


def uninstall() -> None:
    """Restore every patched symbol of DeepSpeed.

    Destroy FP8 engines first: without the patched gather, an engine of ZeRO 1 or 2 raises in its next step, or in its
    next load of a universal checkpoint. Steps with FP8 states, and ZeRO 3, need no patch and go on.
    """
    _remove_finder()
    RECORD.undo()


def is_installed() -> bool:
    """Whether `deepspeed.initialize` is wrapped, or will be on import."""
    return bool(RECORD.patches) or RECORD.finder is not None


def _remove_finder() -> None:
    if RECORD.finder is not None and RECORD.finder in sys.meta_path:
        sys.meta_path.remove(RECORD.finder)
    RECORD.finder = None


def _patch(host: ModuleType) -> None:
    original = host.initialize
    wrapped = _wrap(original)
    RECORD.set(host, "initialize", wrapped)
    # `from deepspeed import initialize` before `import fp8_ds` holds the original: rebind those names too.
    for module in list(sys.modules.values()):
        if module is host or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                RECORD.set(module, name, wrapped)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        from fp8_ds.engine.initialize import initialize as fp8_initialize

        return fp8_initialize(original, args, kwargs)

    initialize.fp8_ds_original = original  # type: ignore[attr-defined]
    return initialize
