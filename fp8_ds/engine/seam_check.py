"""Comparison of the installed DeepSpeed with the rows of seams.py.

A missing symbol or parameter raises a SeamError; bodies that no tested version has are named in one warning.
`python -m fp8_ds.engine.seam_check --update` merges the hashes of the installed version into seam_hashes.json. Do that
once the suite passes there, and add the version to seams.TESTED_VERSIONS (docs/versions.md).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import json
import sys
import textwrap
import tokenize
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from fp8_ds.engine.seams import TESTED_VERSIONS, Seam, installed_version, rows
from fp8_ds.errors import SeamError

_HASHES = Path(__file__).with_name("seam_hashes.json")


def find(seam: Seam) -> Any:
    """Return DeepSpeed's own symbol of a row. Raise a SeamError if the symbol or a parameter is missing."""
    try:
        found: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SeamError(_missing(seam, str(error))) from error
    found = getattr(found, "fp8_ds_original", found)
    if seam.parameters:
        accepted = tuple(inspect.signature(_bare(found)).parameters)
        if accepted[: len(seam.parameters)] != seam.parameters:
            raise SeamError(_missing(seam, f"its parameters are {accepted}, expected {seam.parameters} first"))
    return found


def _missing(seam: Seam, detail: str) -> str:
    return (
        f"expected {seam.path} as in DeepSpeed {', '.join(TESTED_VERSIONS)}, got DeepSpeed {installed_version()} "
        f"({detail}). fp8_ds needs it ({seam.why}). Install a tested version."
    )


def _bare(symbol: Any) -> Any:
    """Return the function under decorators. DeepSpeed's NVTX decorator keeps it in a closure only."""
    symbol = inspect.unwrap(symbol)
    while getattr(symbol, "__closure__", None) and tuple(inspect.signature(symbol).parameters) == ("args", "kwargs"):
        inner = [inspect.unwrap(cell.cell_contents) for cell in symbol.__closure__ if callable(cell.cell_contents)]
        if len(inner) != 1:
            break
        symbol = inner[0]
    return symbol


@cache
def body_hash(symbol: Any) -> str:
    """Return 16 hex digits of SHA-256 over the source of a function without docstring, comments and white space.

    Text is hashed, because the dump of a syntax tree differs between Python versions. To read 88 functions takes a
    quarter of a second, and an engine's start asks twice.
    """
    source = textwrap.dedent(inspect.getsource(_bare(symbol)))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    function = ast.parse(source).body[0]
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines[docstring.lineno - 1 : docstring.end_lineno] = []
    return hashlib.sha256("".join("".join(lines).split()).encode()).hexdigest()[:16]


def installed_hashes() -> dict[str, str]:
    """Return the body hash of every function among the rows, by its path in the installed DeepSpeed."""
    found = {seam.path: find(seam) for seam in rows()}
    return {path: body_hash(symbol) for path, symbol in found.items() if not inspect.isclass(symbol)}


def check_seams() -> None:
    """Raise a SeamError if a symbol or parameter is missing, and name untested bodies in one warning."""
    known = json.loads(_HASHES.read_text()).values()
    unknown = [path for path, digest in installed_hashes().items() if all(table.get(path) != digest for table in known)]
    if unknown:
        warnings.warn(
            f"fp8_ds is tested with DeepSpeed {', '.join(TESTED_VERSIONS)}; in {installed_version()} these bodies "
            f"differ: {', '.join(unknown)}. Run the fp8_ds test-suite against this version before you rely on it.",
            stacklevel=2,
        )


def update_hashes(path: Path = _HASHES) -> None:
    """Write the hashes of the installed version into the file at `path`, beside those of other versions."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[installed_version()] = installed_hashes()
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        raise SystemExit(f"expected --update, got {sys.argv[1:]}. See the top of {__file__}.")
    update_hashes()
