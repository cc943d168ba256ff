"""One line of JSON about a Megatron, for `fp8-ds doctor`: `python -m megatron_patches.survey [CLONE]`.

    version      of the clone, or of the megatron.core that `import` finds
    tested       versions
    num_symbols  of patches.py that are there with their parameters
    error        why it cannot be patched; empty: it can
    differing    which bodies are none of the tested ones; empty: none

In a process of its own: importing Megatron takes seconds, and changes torch. Nothing is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fp8_ds.errors import Fp8DsError
from megatron_patches import compat, patches, pretrain_gpt


def survey(clone: Path | None = None) -> dict[str, Any]:
    """The object above; without a clone of megatron.core alone."""
    found: dict[str, Any] = {"version": "", "num_symbols": 0, "error": "", "differing": ""}
    found["tested"] = compat.TESTED_VERSIONS
    try:
        if clone is not None:
            found["version"] = str(compat.version_of_clone(clone))
            pretrain_gpt.use_clone(clone)
        found["version"] = str(compat.version())
        rows = patches.rows("core") if clone is None else patches.rows()
        found["differing"] = patches.other_bodies({row.path: patches.find(row) for row in rows})
        found["num_symbols"] = len(rows)
    except Fp8DsError as error:
        found["error"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(survey(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
