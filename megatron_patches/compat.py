"""Version of the installed Megatron, or of a clone, and whether it has Transformer Engine."""

from __future__ import annotations

import importlib
import runpy
import sys
import typing
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from fp8_ds.errors import SeamError

TESTED_VERSIONS = ("0.16.1", "0.19.1", "0.20.0")
"""Versions by which megatron.core calls itself in tags core_v0.16.1 and core_v0.19.0 (which says 0.19.1), and in main
at d98e8a64. docs/megatron.md says what was run with each."""
OLDEST = Version("0.16.0")
_NEEDS_PYTHON_312 = Version("0.17")


class TransformerEngine(NamedTuple):
    """Whether Megatron builds Transformer Engine's layers; its version, or why there is none."""

    found: bool
    detail: str


def version() -> Version:
    """Return the version of the megatron.core that `import` finds.

    Raises:
        SeamError: there is none, or it is older than OLDEST.
    """
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise SeamError(
            f"megatron.core: expected to import it, got {error}. Install megatron-core==0.16.1, or run from a clone of "
            "Megatron-LM."
        ) from error
    return _checked(core.__version__, "megatron.core")


def version_of_clone(path: Path) -> Version:
    """Return the version of a clone of Megatron-LM with this root, without importing it.

    Raises:
        SeamError: it is no clone, or older than OLDEST.
    """
    info = path / "megatron" / "core" / "package_info.py"
    if not info.exists():
        raise SeamError(
            f"{path}: expected a clone of Megatron-LM, got no {info.relative_to(path)}. Clone NVIDIA/Megatron-LM."
        )
    numbers = runpy.run_path(str(info))
    text = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}{numbers.get('PRE_RELEASE') or ''}"
    return _checked(text, str(path))


def use_clone(path: Path) -> None:
    """Make `import megatron` find the clone, if its version can run here.

    Raises:
        SeamError: it cannot; or Megatron has been imported from elsewhere.
    """
    found = version_of_clone(path)
    if found >= _NEEDS_PYTHON_312 and not hasattr(typing, "override"):
        raise SeamError(
            f"{path}: expected Python 3.12 or later for Megatron {found}, got {sys.version.split()[0]}. Use that "
            "Python, or check out core_v0.16.1."
        )
    sys.path.insert(0, str(path))
    core = importlib.import_module("megatron.core")
    if not Path(str(core.__file__)).resolve().is_relative_to(path):
        raise SeamError(
            f"megatron.core: expected it in {path}, got {core.__file__}. Import no Megatron before the wrapper, and "
            "uninstall a megatron-core that is found first."
        )


def _checked(text: str, where: str) -> Version:
    found = Version(text)
    if found < OLDEST:
        raise SeamError(
            f"{where}: expected Megatron {OLDEST} or later, got {found}. Check out core_v0.16.1 or a later release."
        )
    if found.public not in TESTED_VERSIONS:
        warnings.warn(
            f"megatron_patches is tested with Megatron {', '.join(TESTED_VERSIONS)}, and this is {found}: every symbol "
            "that is touched is checked, what it does is not.",
            stacklevel=3,
        )
    return found


def require_private(tensors: Iterable[Any], names: Iterable[str], remedy: str) -> None:
    """Raise SeamError where a tensor lacks an attribute that is private to Transformer Engine."""
    for tensor in tensors:
        for name in names:
            if not hasattr(tensor, name):
                raise SeamError(
                    f"{type(tensor).__module__}.{type(tensor).__qualname__}.{name}: expected it as in Transformer "
                    f"Engine 2.11, got none ({transformer_engine().detail}). {remedy}"
                )


def transformer_engine() -> TransformerEngine:
    """Return whether Megatron has Transformer Engine, by its own `megatron.core.fp8_utils.HAVE_TE`."""
    fp8_utils = importlib.import_module("megatron.core.fp8_utils")
    if fp8_utils.HAVE_TE:
        try:
            return TransformerEngine(True, version_of("transformer-engine"))
        except PackageNotFoundError:
            return TransformerEngine(True, "of unknown version")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: of a broken installation
        return TransformerEngine(False, f"transformer_engine.pytorch does not import: {error}")
    return TransformerEngine(False, "Megatron did not find it")
