"""Filter of the guards that torch.compile checks before each call of a graph: our own fixed objects are left out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import nn

_OURS = "G['__import_fp8_ds_dot_"
"""Beginning of the names of guards on our modules: their functions, classes and constants."""
_OTHERS = re.compile(r"G\['\w+'\]\.(torch|nn|F)\b")
"""Foreign modules that are reached through ours: users may replace what is in them."""
_SHARED = re.compile(r"\.fp8_recipe\.(shared|history|grad_format)$")
"""Objects that recipes of several layers have in common, from the conversion on."""


def without_fixed(compile_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `compile_kwargs` with a filter that leaves fixed guards out, after the user's own filter if there is one.

    With delayed scales these are nearly half of a layer's guards and most of those that run Python, one for each pair
    of layers that share an object, at a microsecond or two. With a "mode" other than torch's own "default" all guards
    stay, because torch takes no options beside one.
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
        """Return for each guard whether it is kept."""
        kept = self.first(guards) if self.first is not None else [True] * len(guards)
        return [
            bool(one) and not (is_fixed(guard.name, guard.guard_type) or is_on_a_method(guard))
            for one, guard in zip(kept, guards, strict=True)
        ]


def is_fixed(name: str, kind: str) -> bool:
    """Whether a guard checks something that no run changes.

    Args:
        name: the guarded object, as torch spells it.
        kind: torch's name of the guard: DUPLICATE_INPUT says that two names are of one object.
    """
    if name.startswith(_OURS):
        return kind in ("DUPLICATE_INPUT", "MODULE_MATCH") or _OTHERS.match(name) is None
    if kind == "DUPLICATE_INPUT":
        return _SHARED.search(name) is not None
    return ".fp8_recipe" in name and name.startswith(("type(", "dict(type("))


def is_on_a_method(guard: Any) -> bool:
    """Whether a guard checks that no attribute of an object of ours hides a method or property of its class.

    None does. Modules, whose `forward` others replace, and a user's classes are left to torch.

    Args:
        guard: torch's GuardFilterEntry.
    """
    if guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" or not getattr(guard, "has_value", False):
        return False
    owner = type(guard.value)
    if not owner.__module__.startswith("fp8_ds.") or issubclass(owner, nn.Module):
        return False
    name = getattr(guard.orig_guard.create_fn, "keywords", {}).get("attr", "")
    return isinstance(inspect.getattr_static(owner, name, None), FunctionType | property)
