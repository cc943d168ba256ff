"""What torch.compile looks at before each call of a graph, without what is ours and stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_OURS = "G['__import_fp8_ds_dot_"
"""How the names of guards on our modules begin: their functions, classes and constants."""
_OTHERS = re.compile(r"G\['\w+'\]\.(torch|nn|F)\b")
"""What is reached through our modules and is not ours: users may replace it."""
_SHARED = re.compile(r"\.fp8_recipe\.(shared|history|grad_format)$")
"""Objects that recipes of several layers have in common, from the conversion on."""


def without_fixed(compile_kwargs: dict[str, Any]) -> dict[str, Any]:
    """`compile_kwargs` of an engine, with a filter that leaves these guards out, after the user's own if there is one.

    A quarter of a layer's guards are such, and most of those that run Python, one each for two layers that share an
    object: a microsecond or two. With a "mode" other than torch's own "default" everything stays, for torch takes no
    options beside one.
    """
    if compile_kwargs.get("mode") not in (None, "default"):
        return compile_kwargs
    options = dict(compile_kwargs.get("options") or {})
    options["guard_filter_fn"] = _Filter(options.get("guard_filter_fn"))
    others = {name: value for name, value in compile_kwargs.items() if name != "mode"}
    return {**others, "options": options}


class _Filter:
    def __init__(self, first: Callable[[Sequence[Any]], Sequence[bool]] | None) -> None:
        self.first = first

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        """For each, whether it is kept."""
        kept = self.first(guards) if self.first is not None else [True] * len(guards)
        return [
            bool(one) and not is_fixed(guard.name, guard.guard_type) for one, guard in zip(kept, guards, strict=True)
        ]


def is_fixed(name: str, kind: str) -> bool:
    """Whether a guard is on what no run changes.

    Args:
        name: the guarded object, as torch spells it.
        kind: torch's name of the guard: DUPLICATE_INPUT says that two names are of one object.
    """
    if name.startswith(_OURS):
        return kind in ("DUPLICATE_INPUT", "MODULE_MATCH") or _OTHERS.match(name) is None
    if kind == "DUPLICATE_INPUT":
        return _SHARED.search(name) is not None
    return ".fp8_recipe" in name and name.startswith(("type(", "dict(type("))
