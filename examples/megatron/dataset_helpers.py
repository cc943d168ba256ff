"""Megatron's compiled dataset helper is in the clone afterwards: from the wheel of megatron-core of the same Python.

Without it Megatron runs `make`, which needs a compiler and pybind11. Nothing is copied where it is there already, or
where no megatron-core is installed.
"""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from pathlib import Path


def main(clone: Path) -> None:
    target = clone / "megatron" / "core" / "datasets"
    names = [f"helpers_cpp{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    if any((target / name).exists() for name in names):
        return
    installed = (Path(entry) / "megatron" / "core" / "datasets" for entry in sys.path if entry)
    for source in (folder / name for folder in installed for name in names):
        if source.exists() and source.parent != target:
            shutil.copy(source, target)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
