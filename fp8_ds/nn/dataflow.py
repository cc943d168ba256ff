"""Which linears read what a module computes, as the source of the model's `forward` methods says.

Straight-line code is followed: `h = self.norm(x)`, then every `self.child(h)` until `h` is assigned again; and
`self.child(self.norm(x))`. Inside a child that is no linear the same is asked of its own `forward`, for the argument
that `h` became. What cannot be followed reads nothing here; nothing is guessed from names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_MAX_DEPTH = 4
"""Modules that a tensor is followed into."""


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """The `forward` that its class defines, without decorators' wrappers; None if the instance has another."""
    if "forward" in vars(module):
        return None
    return inspect.unwrap(type(module).forward)


def parse(function: Callable[..., Any] | None) -> ast.FunctionDef | None:
    """Its syntax tree, or None where there is no source."""
    if function is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    node = tree.body[0] if tree.body else None
    return node if isinstance(node, ast.FunctionDef) and node.args.args else None


def child_name(node: ast.AST, function: ast.FunctionDef) -> str | None:
    """`name` of a call `self.name(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    owner = node.func.value
    is_self = isinstance(owner, ast.Name) and owner.id == function.args.args[0].arg
    return node.func.attr if is_self else None


def linears_that_read(parent: nn.Module, name: str) -> list[nn.Linear]:
    """The linears that are given what `parent`'s child `name` returns, in the order of the calls.

    Args:
        parent: the module whose `forward` calls that child.
        name: attribute of it. Called more than once, or not by name: nothing.
    """
    function = parse(forward_of(parent))
    if function is None:
        return []
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    calls = [node for node in nodes if child_name(node, function) == name]
    if len(calls) != 1:
        return []
    found: dict[nn.Linear, None] = {}
    for call, argument in _readers(function, calls[0]):
        for linear in _descend(parent, child_name(call, function), argument, _MAX_DEPTH):
            found[linear] = None
    return list(found)


def _readers(function: ast.FunctionDef, source: ast.Call) -> Iterator[tuple[ast.Call, int | str]]:
    """Calls of children that are given the value of `source`, and as which argument."""
    for node in ast.walk(function):
        yield from ((call, argument) for call, argument, value in _arguments(node, function) if value is source)
        for block in _blocks(node):
            for i, statement in enumerate(block):
                if isinstance(statement, ast.Assign) and statement.value is source:
                    target = statement.targets[0]
                    if len(statement.targets) == 1 and isinstance(target, ast.Name):
                        yield from _readers_of_name(function, block[i + 1 :], target.id)


def _readers_of_name(
    function: ast.FunctionDef, statements: Iterable[ast.stmt], name: str
) -> Iterator[tuple[ast.Call, int | str]]:
    """Calls of children that are given the variable `name`, up to the statement that assigns it again."""
    for statement in statements:
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            for call, argument, value in _arguments(node, function):
                if isinstance(value, ast.Name) and value.id == name:
                    yield call, argument
        if any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(statement)):
            return


def _arguments(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[ast.Call, int | str, ast.expr]]:
    if isinstance(node, ast.Call) and child_name(node, function) is not None:
        yield from ((node, i, value) for i, value in enumerate(node.args))
        yield from ((node, word.arg, word.value) for word in node.keywords if word.arg is not None)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    blocks = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
    return [block for block in blocks if isinstance(block, list)]


def _descend(parent: nn.Module, name: str | None, argument: int | str, depth: int) -> Iterator[nn.Linear]:
    """The linears that read argument `argument` of the child `name`: itself, or some inside it."""
    child = parent._modules.get(name) if name is not None else None
    if isinstance(child, nn.Linear):
        yield child
        return
    function = parse(forward_of(child)) if child is not None and depth > 0 else None
    if child is None or function is None:
        return
    parameters = [one.arg for one in function.args.args][1:]
    if isinstance(argument, int):
        if argument >= len(parameters):
            return
        argument = parameters[argument]
    for call, inner in _readers_of_name(function, function.body, argument):
        yield from _descend(child, child_name(call, function), inner, depth - 1)
