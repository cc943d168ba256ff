"""Which Megatron is installed, or lies in a clone; whether it has Transformer Engine."""

from __future__ import annotations

import ast
import importlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from fp8_ds.errors import SeamError

TESTED_VERSIONS = ("0.16.1", "0.19.1", "0.20.0")
"""What megatron.core calls itself in tags core_v0.16.1 and core_v0.19.0 (which says 0.19.1), and in main at d98e8a64.
docs/megatron.md says what was run with each."""
OLDEST = Version("0.16.0")


class TransformerEngine(NamedTuple):
    """What Megatron has found.

    Args:
        found: whether Megatron builds Transformer Engine's layers.
        detail: its version; or why there is none.
    """

    found: bool
    detail: str


def version() -> Version:
    """Of the megatron.core that `import` finds.

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
    """Of a clone of Megatron-LM, without importing it.

    Args:
        path: its root, where pretrain_gpt.py is.

    Raises:
        SeamError: it is no clone, or older than OLDEST.
    """
    info = path / "megatron" / "core" / "package_info.py"
    if not info.exists():
        raise SeamError(
            f"{path}: expected a clone of Megatron-LM, got no {info.relative_to(path)}. Clone NVIDIA/Megatron-LM."
        )
    numbers: dict[str, Any] = {}
    for node in ast.parse(info.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            numbers.update({target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)})
    text = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}{numbers.get('PRE_RELEASE') or ''}"
    return _checked(text, str(path))


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


def transformer_engine() -> TransformerEngine:
    """What Megatron's own FP8 code goes by, `megatron.core.fp8_utils.HAVE_TE`."""
    fp8_utils = importlib.import_module("megatron.core.fp8_utils")
    if fp8_utils.HAVE_TE:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        try:
            return TransformerEngine(True, version_of("transformer-engine"))
        except PackageNotFoundError:
            return TransformerEngine(True, "of unknown version")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: of a broken installation
        return TransformerEngine(False, f"transformer_engine.pytorch does not import: {error}")
    return TransformerEngine(False, "Megatron did not find it")
