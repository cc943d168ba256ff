"""Which code computes here: a hash of the sources that decide how fast a linear is."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fp8_ds import __version__

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("nn", "ops")


@functools.cache
def code_hash(package: Path = _PACKAGE) -> str:
    """12 hex digits, others after any change to layers or kernels; of a package without sources those of its version.

    Args:
        package: the folder fp8_ds.
    """
    digest = hashlib.sha256(f"fp8_ds {__version__}\n".encode())
    for path in sorted(path for folder in _FOLDERS for path in (package / folder).rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
