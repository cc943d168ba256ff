"""Data flow to linears, read from the source of the model's `forward` methods.

A name stands for the expression that was assigned to it last. Values that cannot be followed have no readers; nothing
is guessed from names. The source is read and not run: `deepspeed.initialize` has no inputs for a forward, and one on
made-up inputs would run a user's code, its random numbers, counters and collectives.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_MAX_NODES = 200  # of an expression: a SwiGLU has some 30


def parse(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the syntax tree without docstring and without decorators' wrappers; None if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return tree if tree.body and tree.args.args else None


class Flow(ast.NodeTransformer):
    """A method's tree, in which each local name of a computed value is replaced by the very node that computes it.

    A second name of a value (`residual = x`) is not followed; a name assigned in a branch or loop is known to its end.

    Attributes:
        names: of the arguments, `self` first.
        parameters: nodes that stand for the arguments after `self`, by position and by name.
        calls: (name, call) of each `self.name(...)`, inner ones first.
        expression: the text of the last statement, if it is short and those before it only give names to values.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.names = [one.arg for one in tree.args.args]
        keywords = [one.arg for one in tree.args.kwonlyargs]
        self._values: dict[str, Any] = {name: ast.Name(name, ast.Load()) for name in self.names + keywords}
        self._self, *parameters = (self._values[name] for name in self.names)
        self.parameters: dict[Any, Any] = dict(enumerate(parameters)) | self._values
        self.calls: list[tuple[str, ast.Call]] = []
        is_expression = all(map(_names_given, tree.body[:-1]))
        for statement in tree.body:
            self.visit(statement)
        # A value that is named once and used twice is there twice: 40 lines of `x = x + x` would be 2**40 nodes.
        is_short = len(list(itertools.islice(ast.walk(tree.body[-1]), _MAX_NODES))) < _MAX_NODES
        self.expression = ast.unparse(tree.body[-1]) if is_expression and is_short else ""

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        before, kept = self._values, {name: value for name, value in self._values.items() if name not in stored}
        names = _names_given(node)
        for field, value in ast.iter_fields(node):
            self._values = dict(before)
            if isinstance(value, list):
                value[:] = [self.visit(one) if isinstance(one, ast.AST) else one for one in value]
            elif isinstance(value, ast.AST):
                setattr(node, field, self.visit(value))
        self._values = kept | dict.fromkeys(names, getattr(node, "value", None))
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.value is self._self:
            self.calls.append((node.func.attr, node))
        return node


def _names_given(node: ast.stmt) -> list[str]:
    """Return the names that `node` gives, doing nothing else, to the result of a call or an operator."""
    targets = node.targets if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.BinOp)) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else []


def flow_of(module: nn.Module) -> Flow | None:
    """Return the flow of the class's `forward`; None if that has no source, or the instance has another forward."""
    return None if "forward" in vars(module) else _flow(type(module).forward)


@functools.lru_cache
def _flow(function: Callable[..., Any]) -> Flow | None:
    tree = parse(function)
    return None if tree is None else Flow(tree)


def linears_that_read(parent: nn.Module, name: str) -> list[nn.Linear]:
    """Return the linears that are given what `parent`'s child `name` returns, in the order of the calls.

    The list is empty if the `forward` of `parent` calls the child more than once, or not by that name.
    """
    flow = flow_of(parent)
    calls = [] if flow is None else [call for child, call in flow.calls if child == name]
    return list(dict.fromkeys(_readers(parent, flow, calls[0]))) if len(calls) == 1 else []


def _readers(module: nn.Module, flow: Flow | None, value: ast.AST | None) -> Iterator[nn.Linear]:
    """Yield the linears that are given `value`, a node of `flow`, which is the forward of `module`."""
    for name, call in flow.calls if flow is not None and value is not None else ():
        for place, given in [*enumerate(call.args), *((word.arg, word.value) for word in call.keywords)]:
            child = module._modules.get(name) if given is value else None
            if isinstance(child, nn.Linear):
                yield child
            elif child is not None and (inner := flow_of(child)) is not None:
                yield from _readers(child, inner, inner.parameters.get(place))
