"""Arms of a parity study: the "fp8" block of each, by recipe and by state format."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8_ds import json_text
from fp8_ds.errors import ConfigError

BASE = "bf16"
OWN, DEFAULT = "config", "default"
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
CHANGES: dict[str, dict[str, Any]] = {
    "tensorwise": {"linear": {"recipe": "tensorwise"}},
    "delayed": {"linear": {"recipe": "delayed"}},
    "rowwise": {"linear": {"recipe": "rowwise"}},
    "rowwise_with_gw_hp": {"linear": {"recipe": "rowwise_with_gw_hp"}},
    "blockwise": {"linear": {"recipe": "blockwise"}},
    "ends-in-bf16": {"linear": {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}},
    "e4m19": {"optimizer": {"states": "fp8", "master": "e4m19"}},
    "e4m11": {"optimizer": {"states": "fp8", "master": "e4m11"}},
}
"""What an arm changes in a block: five recipes, the first and last layer in bf16, then two formats of masters under
FP8 moments."""


def changed(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`block` with the entries of `changes`, sections joined key by key."""
    result = copy.deepcopy(dict(block))
    for section, values in changes.items():
        result[section] = {**result.get(section, {}), **values}
    return result


def seeded(block: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`block` for the runs of one pair: what FP8 states round by follows its seed, too, unless the block names one.

    Else all pairs would share what their rounding adds, and no interval over pairs would show it.
    """
    optimizer = block.get("optimizer", {})
    if optimizer.get("states") != "fp8" or "seed" in optimizer:
        return dict(block)
    return changed(block, {"optimizer": {"seed": seed}})


def resolve(arm: str, own: Mapping[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
    """The arm's name and its "fp8" block; None: no block, stock bf16.

    Args:
        arm: "bf16"; "default", exactly {"enabled": true}; "config", the configuration's own block; a name of CHANGES,
            which changes that block, or the default where there is none; or NAME=FILE.json with a block in it.
        own: the configuration's own block.

    Raises:
        ConfigError: none of these, there is no block for "config", or NAME is none for a file or is of another arm.
        OSError: the file cannot be read.
    """
    if arm == BASE:
        return arm, None
    if arm == DEFAULT:
        return arm, {"enabled": True}
    has_own = own is not None and bool(own.get("enabled"))
    if arm == OWN:
        if not has_own:
            raise ConfigError(
                '--arms config: expected an enabled "fp8" block in --config, got none. Add one, or use "default".'
            )
        return arm, dict(own or {})
    name, equals, path = arm.partition("=")
    if equals:
        _check_name(name, arm)
        return name, _read_block(Path(path))
    if arm not in CHANGES:
        known = ", ".join([BASE, DEFAULT, OWN, *CHANGES])
        raise ConfigError(f"--arms: expected some of {known}, or NAME=FILE.json, got {arm!r}. Name one of these.")
    return arm, changed(own if has_own and own is not None else {"enabled": True}, CHANGES[arm])


def resolve_all(arms: Sequence[str], own: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    """`resolve` of each, in their order.

    Raises:
        ConfigError: as `resolve`; or two have one name.
        OSError: as `resolve`.
    """
    found: dict[str, dict[str, Any] | None] = {}
    for name, block in (resolve(arm, own) for arm in arms):
        if name in found:
            raise ConfigError(f"--arms: expected each name once, got {name} again. Leave it out, or name it otherwise.")
        found[name] = block
    return found


def _check_name(name: str, arm: str) -> None:
    """Raises: ConfigError: the files of the arm's runs cannot have it, or it says what the arm is not."""
    if not _NAME.fullmatch(name) or name in (BASE, DEFAULT, OWN, *CHANGES):
        raise ConfigError(
            f"--arms: expected a name of its own before =, of letters, digits, _, - and dots, got {arm!r}. Its runs' "
            "files are named by it: name it otherwise."
        )


def _read_block(path: Path) -> dict[str, Any]:
    try:
        block = json_text.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ConfigError(f'--arms: expected an "fp8" block as JSON in {path}, got {error}. Correct it.') from error
    inner = block.get("fp8", block) if isinstance(block, dict) else block
    if not isinstance(inner, dict):
        raise ConfigError(
            f'--arms: expected an "fp8" block, a JSON object, in {path}, got {type(inner).__name__}. Correct it.'
        )
    return inner
