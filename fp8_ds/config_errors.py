"""What is wrong with a key of the "fp8" block, in words: what was expected, what was there, and what to do.

Of what pydantic refuses: unknown keys, and values that a key does not take. Values that contradict each other are
refused in config.py, in its own words.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import ErrorDetails

if TYPE_CHECKING:
    from fp8_ds.config import Key

# Of the whole block in DESIGN.md, values of keys that a later version brings.
_LATER_VALUES = {
    "fp8.linear.backend": ("te",),
}
_NOT_YET = "not available in this version"


def as_json(value: Any) -> str:
    """One line; what JSON has no form for as Python shows it."""
    return json.dumps(value, default=repr)


def explain(details: ErrorDetails, known: Mapping[str, Key]) -> str:
    """One line "<key>: expected ..., got <value>. <remedy>." for one pydantic error.

    Args:
        details: of the error, whose `loc` begins within the block.
        known: every key, `Fp8Config.keys()`.
    """
    path = [str(part) for part in details["loc"]]
    if details["type"] == "string_too_short" and path[-1] == "[key]":  # of an object whose keys name layers
        path = path[:-2]
    key = ".".join(["fp8", *path])
    value = details["input"]
    if details["type"] == "extra_forbidden":
        return f"{key}: expected a known key, got {as_json(value)}. {_unknown_key_remedy(key, known)}"
    if details["type"] == "missing":
        return f'{key}: expected true or false, got nothing. Write "{path[-1]}": true.'
    said = f"{key}: expected {_expected(key, details, known)}, got {as_json(value)}"
    if value == "auto":
        return f"{said}. {_auto_remedy(known.get(key))}"
    if value in _LATER_VALUES.get(key, ()):
        return f"{said}, {_NOT_YET}. Use one of the former."
    return f"{said}. {_value_remedy(key, value, details, known.get(key))}"


def explain_no_object(block: Any) -> str:
    """Likewise, of a whole block that is no JSON object."""
    return f'fp8: expected an object such as {{"enabled": true}}, got {as_json(block)}. {_block_remedy(block)}'


def _expected(key: str, details: ErrorDetails, known: Mapping[str, Key]) -> str:
    limits = {"greater_than_equal": ("ge", "of at least"), "greater_than": ("gt", "above")}
    limits["less_than_equal"] = ("le", "of at most")
    if details["type"] in limits:
        name, words = limits[details["type"]]
        kind = "an integer" if isinstance(details["ctx"][name], int) else "a number"
        return f"{kind} {words} {details['ctx'][name]}"
    if key.startswith("fp8.schedule.layers."):
        return '"bf16" or "fp8"'
    if details["type"] == "string_too_short":
        return "a string of at least one character"
    if key in known:
        values = known[key].values.split(", ")
        return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
    return "a string" if key.startswith("fp8.linear.filter_fqns") else "an object of keys"


def _value_remedy(key: str, value: Any, details: ErrorDetails, known: Key | None) -> str:
    if details["type"] == "literal_error" and isinstance(value, str):
        near = difflib.get_close_matches(value.lower(), re.findall("'([^']+)'", details["ctx"]["expected"]), n=1)
        if near:
            return f'Did you mean "{near[0]}"?'
    if details["type"] == "string_too_short" and key.startswith("fp8.linear.filter_fqns"):
        return "An empty string is part of every name and would leave no layer to convert: remove it."
    if details["type"] == "string_too_short" and key == "fp8.schedule.layers":
        return "An empty string is part of every name: name layers, or parts of their names."
    if known is None:
        return "See docs/config.md."
    # With commas in it, as on torchtitan's command line.
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else []
    if names and known.values == "list of strings":
        return f"Write {as_json(names)}."
    if (bare := _without_quotes(value, known.values.split(", "))) is not None:
        return f"Write {bare} without quotes: in JSON they make a string of it."
    if known.default == "required":
        return "Write true or false."
    return f"Remove the key for the default, {known.default}."


def _without_quotes(value: Any, values: Sequence[str]) -> str | None:
    """The JSON that a string would be without its quotes, also in Python's spelling; None: it is none of `values`."""
    bare = value.strip().lower().replace("none", "null") if isinstance(value, str) else ""
    try:
        found = json.loads(bare)
    except ValueError:
        return None
    kind = {bool: bare, type(None): bare, int: "integer", float: "number"}.get(type(found))
    return bare if kind in values or (kind == "integer" and "number" in values) else None


def _auto_remedy(known: Key | None) -> str:
    hint = "write true or false" if known and known.values == "true, false" else "write a value, or remove the key"
    return f'"auto" is not supported: no tool fills it in inside the "fp8" block; {hint}.'


def _unknown_key_remedy(key: str, known: Collection[str]) -> str:
    blocks = [block for block in dict.fromkeys(other.rpartition(".")[0] for other in known) if block != "fp8"]
    parent, _, name = key.rpartition(".")
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    siblings = [other for other in (*known, *blocks) if other.rpartition(".")[0] == parent]
    near = elsewhere or difflib.get_close_matches(key, siblings, n=1) or difflib.get_close_matches(key, known, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Known here: {', '.join(siblings)}."


def _block_remedy(block: Any) -> str:
    bare = block.strip().lower() if isinstance(block, str) else as_json(block)
    if bare in ("true", "false"):
        return f'Write "fp8": {{"enabled": {bare}}}.'
    if block == "auto":
        return '"auto" is not supported: write {"enabled": true}, or remove the key.'
    return "See docs/config.md."
