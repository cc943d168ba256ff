"""What a Megatron is, and whether every symbol that patches.py touches is in it as tested, as one line of JSON.

    python -m megatron_patches.survey [CLONE]

For `fp8-ds doctor`, which gives it a process of its own: importing Megatron takes seconds, and changes torch.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TypedDict

from fp8_ds.errors import Fp8DsError
from megatron_patches.symbols import Part


class Survey(TypedDict):
    """What was found; a text is empty where there is nothing to say.

    Attributes:
        version: of Megatron.
        num_symbols: that are there with their parameters.
        error: why it cannot be patched.
        differing: which bodies are none of the tested ones.
    """

    version: str
    num_symbols: int
    error: str
    differing: str


def survey(clone: Path | None = None) -> Survey:
    """Of the clone, megatron.training with it, or of the megatron.core that `import` finds. Nothing is replaced."""
    from megatron_patches import compat, patches, pretrain_gpt

    found: Survey = {"version": "", "num_symbols": 0, "error": "", "differing": ""}
    parts: tuple[Part, ...] = ("core",) if clone is None else ("core", "training")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if clone is not None:
                found["version"] = str(compat.version_of_clone(clone))
                pretrain_gpt.use_clone(clone)
            found["version"] = str(compat.version())
            patches.check(*parts)
            found["num_symbols"] = len(patches.rows(*parts))
        except Fp8DsError as error:
            found["error"] = str(error)
    texts = [str(one.message) for one in said]
    found["differing"] = next((text for text in texts if "these bodies differ" in text), "")
    return found


if __name__ == "__main__":
    print(json.dumps(survey(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
