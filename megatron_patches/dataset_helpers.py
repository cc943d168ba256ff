"""Megatron's compiled dataset helper, `helpers_cpp`, which a fresh clone lacks and the wheel of megatron-core has."""

from __future__ import annotations

import importlib
import importlib.machinery
import shutil
import sys
from pathlib import Path


def copy_helper(datasets: Path) -> bool:
    """Whether the helper is there afterwards: as it was, or from an installed megatron-core of the same Python.

    Args:
        datasets: megatron/core/datasets of a clone.
    """
    names = [f"helpers_cpp{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    if any((datasets / name).exists() for name in names):
        return True
    installed = (Path(entry) / "megatron" / "core" / "datasets" for entry in sys.path if entry)
    for source in (folder / name for folder in installed for name in names):
        if source.exists():
            shutil.copy(source, datasets)
            importlib.invalidate_caches()
            return True
    return False
