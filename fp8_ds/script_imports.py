"""Where a training script imports fp8_ds, as far as its text says."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from fp8_ds.errors import ConfigError

_STARTERS = ("initialize", "train", "prepare")
"""Calls that may be, or lead to, `deepspeed.initialize`: its own, Trainer's, Accelerate's."""


def parsed(script: Path) -> ast.Module:
    """Its tree.

    Raises:
        ConfigError: it is no Python.
        OSError: it cannot be read.
    """
    source = script.read_bytes()
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--script: expected Python, got {error} in {script}. Name the training script.") from error


def import_in(tree: ast.Module) -> Literal["first", "elsewhere", "nowhere"]:
    """Where the script imports fp8_ds; first: it runs for sure, before anything that may make an engine."""
    starters = _starters(tree)
    for statement in _that_run(tree.body):
        if _imports(statement):
            return "first"
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and starters & _calls(
            statement
        ):
            break
    return "elsewhere" if any(map(_imports, _live(tree))) else "nowhere"


def _imports(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    return any(name.split(".")[0] == "fp8_ds" for name in names)


def _that_run(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run for sure once the script is started, in order."""
    for statement in body:
        if isinstance(statement, ast.If) and (is_true := _known(statement.test)) is not None:
            yield from _that_run(statement.body if is_true else statement.orelse)
        elif isinstance(statement, (ast.Try, ast.With)):
            yield from _that_run(statement.body)
        else:
            yield statement


def _known(test: ast.expr) -> bool | None:
    """What a condition is in a script that is started; None: that cannot be said."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    text = ast.unparse(test)
    if text in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return False
    return True if text == "__name__ == '__main__'" else None


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in `node` but those under conditions that never hold."""
    yield node
    children: Iterator[ast.AST] | list[ast.stmt] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and _known(node.test) is False:
        children = node.orelse
    for child in children:
        yield from _live(child)


def _calls(node: ast.AST) -> set[str]:
    """Names of what is called in `node`, without what they are attributes of."""
    functions = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in functions}


def _starters(tree: ast.Module) -> set[str]:
    """Names that may lead to `deepspeed.initialize` when called: the script's own functions that do, too."""
    calls = {
        node.name: _calls(node) for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    found = set(_STARTERS)
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found
