"""The bodies of Megatron's functions that megatron_patches was tested with: bodies.json, version -> path -> hash.

`python -m megatron_patches.bodies --update`, run where `import megatron` finds a clone, merges its hashes into the
file. Do that once the tests pass there, and add the version to compat.TESTED_VERSIONS (docs/megatron.md).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8_ds.engine.seam_check import body_hash

FILE = Path(__file__).with_name("bodies.json")
Hashes = dict[str, dict[str, str]]


def known() -> Hashes:
    """Version -> path -> hash."""
    found: Hashes = json.loads(FILE.read_text())
    return found


def hashes(symbols: Mapping[str, Any]) -> dict[str, str]:
    """Path -> hash of each function; constants and classes are left out.

    Args:
        symbols: path -> what Megatron has there.
    """
    return {path: body_hash(symbol) for path, symbol in symbols.items() if inspect.isroutine(symbol)}


def others(symbols: Mapping[str, Any], tested: Hashes) -> list[str]:
    """Paths of functions whose body is that of no tested version; of those that any version has a hash of."""
    listed = {path for table in tested.values() for path in table}
    found = hashes({path: symbol for path, symbol in symbols.items() if path in listed})
    return [path for path, digest in found.items() if all(table.get(path) != digest for table in tested.values())]


def update(path: Path = FILE) -> None:
    """The file at `path` holds the installed version's hashes, beside those of the others."""
    from megatron_patches import compat, patches

    tested = json.loads(path.read_text()) if path.exists() else {}
    tested[compat.version().public] = hashes({row.path: patches.find(row) for row in patches.rows()})
    path.write_text(json.dumps(tested, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        raise SystemExit(f"expected --update, got {sys.argv[1:]}. See the top of {__file__}.")
    update()
