"""What linears read, as the source of the model's `forward` methods says: a name stands for the expression that was
assigned to it last. What cannot be followed reads nothing here; nothing is guessed from names.

It is read and not run: `deepspeed.initialize` has no inputs for a forward, and one on made-up inputs would run a user's
code, its random numbers, counters and collectives.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_MAX_DEPTH = 4
"""Modules that a tensor is followed into."""


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """The `forward` that its class defines, without decorators' wrappers; None if the instance has another."""
    return None if "forward" in vars(module) else inspect.unwrap(type(module).forward)


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


class Flow(ast.NodeTransformer):
    """A method, in whose tree each local name of a computed value is replaced by the very node that computes it.

    A second name of a value (`residual = x`) is not followed, and one assigned in a branch or loop is known to its end.

    Attributes:
        body: the statements.
        parameters: nodes that stand for the arguments behind `self`, by position and by name.
        calls: (name, call) of each `self.name(...)`, inner ones first.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        self._self, *parameters = tree.args.args
        self._values: dict[str, ast.AST] = {one.arg: one for one in tree.args.args + tree.args.kwonlyargs}
        self.body = tree.body
        self.parameters: dict[Any, ast.AST] = dict(enumerate(parameters)) | self._values
        self.calls: list[tuple[str, ast.Call]] = []
        for statement in tree.body:
            self.visit(statement)

    def path(self, node: ast.AST) -> tuple[ast.AST | None, tuple[str, ...]]:
        """(a, ("b", "c")) of the expression `a.b.c`, with None for `self`."""
        names: tuple[str, ...] = ()
        while isinstance(node, ast.Attribute):
            names = (node.attr, *names)
            node = node.value
        return None if node is self._self else node, names

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        is_computed = isinstance(getattr(node, "value", None), (ast.Call, ast.BinOp))
        before, kept = self._values, {name: value for name, value in self._values.items() if name not in stored}
        for field, value in ast.iter_fields(node):
            self._values = dict(before)
            if isinstance(value, list):
                value[:] = [self.visit(one) if isinstance(one, ast.AST) else one for one in value]
            elif isinstance(value, ast.AST):
                setattr(node, field, self.visit(value))
        if isinstance(node, ast.Assign) and is_computed:
            kept |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        self._values = kept
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        owner, names = self.path(node.func)
        if owner is None and len(names) == 1:
            self.calls.append((names[0], node))
        return node


@functools.lru_cache
def flow_of(function: Callable[..., Any] | None) -> Flow | None:
    """That of a method; None where it has no source."""
    tree = parse(function)
    return None if tree is None else Flow(tree)


def linears_that_read(parent: nn.Module, name: str) -> list[nn.Linear]:
    """The linears that are given what `parent`'s child `name` returns, in the order of the calls.

    Args:
        parent: the module whose `forward` calls that child.
        name: attribute of it. Called more than once, or not by name: nothing.
    """
    flow = flow_of(forward_of(parent))
    calls = [] if flow is None else [call for child, call in flow.calls if child == name]
    return list(dict.fromkeys(_readers(parent, flow, calls[0], _MAX_DEPTH))) if len(calls) == 1 else []


def _readers(module: nn.Module, flow: Flow | None, value: ast.AST | None, depth: int) -> Iterator[nn.Linear]:
    """The linears that are given `value`, a node of `flow`, which is the forward of `module`."""
    for name, call in flow.calls if flow is not None and value is not None else ():
        for place, given in [*enumerate(call.args), *((word.arg, word.value) for word in call.keywords)]:
            child = module._modules.get(name) if given is value else None
            if isinstance(child, nn.Linear):
                yield child
            elif child is not None and depth > 0 and (inner := flow_of(forward_of(child))) is not None:
                yield from _readers(child, inner, inner.parameters.get(place), depth - 1)
