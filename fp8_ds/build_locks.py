"""Locks of torch's extension builder that nobody holds: a build that was killed leaves one, and whoever wants that
extension next waits for ever and says nothing (torch 2.11 and 2.13, utils/file_baton.py). On a CPU DeepSpeed builds
one before its first collective."""

from __future__ import annotations

import os
from pathlib import Path

_PROCESSES = Path("/proc")


def build_root() -> Path:
    """Where torch builds extensions: $TORCH_EXTENSIONS_DIR, else a folder of the user's cache."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def abandoned(root: Path) -> list[Path]:
    """Locks below `root` that no process of this machine has open; a builder keeps its lock open until it is done.

    Empty where /proc does not tell (other systems than Linux). Processes of other users and of other machines that
    share the folder are not seen.
    """
    locks = {str(lock.resolve()): lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)}
    if not locks or not (_PROCESSES / "self" / "fd").is_dir():
        return []
    for descriptor in _PROCESSES.glob("[0-9]*/fd/*"):
        try:
            locks.pop(os.readlink(descriptor), None)
        except OSError:  # closed, ended or somebody else's
            continue
    return sorted(locks.values())


def remove_abandoned(root: Path) -> list[Path]:
    """Abandoned locks below `root` are gone; returns their places."""
    found = abandoned(root)
    for lock in found:
        lock.unlink(missing_ok=True)
    return found
