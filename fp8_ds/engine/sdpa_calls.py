"""Where a model's own source calls torch's `scaled_dot_product_attention`, and what it gives it in training.

Read is the `forward` of each module, the methods that it calls on itself, and the functions that it calls by a name.
Nothing is run: an expression has a value where it is made of constants, globals and attributes of the module. A branch
whose condition has one is followed or left out. What belongs to torch, transformers or DeepSpeed is not read.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, EnumMeta
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from fp8_ds.nn.dataflow import forward_of, parse

_SDPA: Any = torch._C._nn.scaled_dot_product_attention
"""Itself: what somebody has put in its place in torch.nn.functional is another function."""

_POSITIONS = {"attn_mask": 3, "dropout_p": 4, "is_causal": 5}
"""Of arguments that need not be given by name (torch 2.11 to 2.13)."""

_NOT_READ = ("torch", "transformers", "deepspeed", "fp8_ds")
_MAX_DEPTH = 4
"""Functions that are read from a forward on, each called by the one before."""

_UNKNOWN: Any = object()
"""The value of what only a run knows."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MAY_END = (ast.For, ast.While, ast.Try, ast.Match)
"""A return in one of these need not be come by."""

_PLAIN = (type(None), bool, int, float, str)
"""Types whose truth and equality are Python's own; a subclass may have code for them."""

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {ast.Is: operator.is_, ast.IsNot: operator.is_not}
_COMPARE |= {ast.Eq: operator.eq, ast.NotEq: operator.ne}


@dataclass(frozen=True)
class SdpaCall:
    """What one call is given; None where only a run knows.

    Args:
        module: whose forward leads to it.
        is_certain: whether each forward comes by, as far as conditions say.
    """

    module: nn.Module
    causal: bool | None
    has_mask: bool | None
    is_grouped: bool | None
    dropout: float | None
    is_certain: bool


def sdpa_calls(model: nn.Module) -> list[SdpaCall]:
    """All that are found; none where the source chooses kernels by `sdpa_kernel`, whose extent is not followed."""
    reader, found = _Reader(), list[SdpaCall]()
    without: set[type[nn.Module]] = set()
    for module in model.modules():
        kind = type(module)
        if kind in without or _is_not_read(kind):
            continue
        reader.has_left_out = False
        calls = list(reader.calls(forward_of(module), module, module, _MAX_DEPTH))
        if not calls and not reader.has_left_out:  # what is left out, another module of the class may do
            without.add(kind)
        found.extend(calls)
    return [] if reader.has_chosen else found


def _is_not_read(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _NOT_READ


class _Reader:
    """Of the functions of one model.

    Attributes:
        has_left_out: whether a branch was.
        has_chosen: whether `sdpa_kernel` was called.
    """

    def __init__(self) -> None:
        self.has_left_out = self.has_chosen = False
        self._trees: dict[Any, ast.FunctionDef | None] = {}

    def calls(self, function: Any, module: nn.Module, owner: object, depth: int) -> Iterator[SdpaCall]:
        """Those in `function` and in what it calls.

        Args:
            module: whose forward leads here.
            owner: what the function is a method of; None: it is none.
        """
        if function not in self._trees:
            self._trees[function] = parse(function)
        tree = self._trees[function]
        if tree is None or depth == 0:
            return
        scope = _Scope(function, tree, owner)
        for node, is_certain in scope.reached([*tree.decorator_list, *tree.body]):
            target = scope.value(node.func)
            self.has_chosen |= target is sdpa_kernel
            if target is _SDPA:
                yield _call(node, scope, module, is_certain)
            elif isinstance(target, FunctionType | MethodType) and not _is_not_read(target):
                called, own = getattr(target, "__func__", target), getattr(target, "__self__", None)
                for call in self.calls(called, module, own, depth - 1):
                    yield replace(call, is_certain=call.is_certain and is_certain)
        self.has_left_out |= scope.has_left_out


class _Scope:
    """What is known of a function's expressions before it runs.

    Attributes:
        has_left_out: whether `reached` has left out a branch.
    """

    def __init__(self, function: Any, tree: ast.FunctionDef, owner: object) -> None:
        self.has_left_out = False
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._names: dict[str, Any] = {**function.__globals__, **{name: _content(cell) for name, cell in cells}}
        self._owner = owner
        self._self = [*tree.args.posonlyargs, *tree.args.args][0].arg if owner is not None else None
        nodes = list(ast.walk(tree))
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        given = [node.arg for node in nodes if isinstance(node, ast.arg)]
        imported = [(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)]
        self._locals: dict[str, ast.expr | None] = dict.fromkeys([*stored, *given, *imported])
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if [*stored, *given, *imported].count(name) == 1:
                    self._locals[name] = node.value

    def reached(
        self, nodes: Iterable[ast.AST], is_certain: bool = True
    ) -> Generator[tuple[ast.Call, bool], None, bool]:
        """The calls in `nodes`, which follow each other, and whether each run comes by.

        Returns:
            Whether no run comes by what follows.
        """
        for node in nodes:
            ends, is_known = False, True
            if isinstance(node, ast.If | ast.IfExp):
                yield from self.reached([node.test], is_certain)
                is_true = _truth(self.value(node.test))
                is_known = is_true is not _UNKNOWN
                for branch, wanted in ((_list(node.body), True), (_list(node.orelse), False)):
                    if is_known and is_true is not wanted:
                        self.has_left_out |= bool(branch)
                    else:
                        ends |= yield from self.reached(branch, is_certain and is_known)
            else:
                if isinstance(node, ast.Call):
                    yield node, is_certain
                is_one_of_many = isinstance(node, ast.match_case)
                ends = yield from self.reached(ast.iter_child_nodes(node), is_certain and not is_one_of_many)
                ends = isinstance(node, ast.Return | ast.Raise) or (ends and not isinstance(node, _FUNCTIONS))
                is_known = not isinstance(node, _MAY_END)
            if ends and is_known:
                return True
            is_certain = is_certain and not ends
        return False

    def value(self, node: ast.AST) -> Any:
        """Of an expression, in training; or `_UNKNOWN`."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id == self._self:
                return self._owner
            if node.id not in self._locals:
                return self._names.get(node.id, _UNKNOWN)
            assigned, self._locals[node.id] = self._locals[node.id], None  # in a loop names may be made of each other
            try:
                return _UNKNOWN if assigned is None else self.value(assigned)
            finally:
                self._locals[node.id] = assigned
        if isinstance(node, ast.Attribute):
            return _attribute(self.value(node.value), node.attr)
        if isinstance(node, ast.IfExp):
            is_true = _truth(self.value(node.test))
            return _UNKNOWN if is_true is _UNKNOWN else self.value(node.body if is_true else node.orelse)
        return self._condition(node)

    def _condition(self, node: ast.AST) -> Any:
        """Of `not`, `and`, `or`, and comparisons of two."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            is_true = _truth(self.value(node.operand))
            return _UNKNOWN if is_true is _UNKNOWN else not is_true
        if isinstance(node, ast.BoolOp):
            decides, values = isinstance(node.op, ast.Or), [_truth(self.value(one)) for one in node.values]
            if decides in values:
                return decides
            return _UNKNOWN if _UNKNOWN in values else not decides
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            sides = self.value(node.left), self.value(node.comparators[0])
            is_plain = all(type(one) in _PLAIN or isinstance(one, Enum) for one in sides)
            if is_plain or (isinstance(node.ops[0], ast.Is | ast.IsNot) and not any(one is _UNKNOWN for one in sides)):
                return _COMPARE[type(node.ops[0])](*sides)
        return _UNKNOWN


def _list(branch: Any) -> list[ast.AST]:
    return branch if isinstance(branch, list) else [branch]


def _truth(value: Any) -> Any:
    """True, False or `_UNKNOWN`."""
    return bool(value) if type(value) in _PLAIN else _UNKNOWN


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its function has not come to the assignment
        return _UNKNOWN


def _attribute(owner: Any, name: str) -> Any:
    """What is stored under this name; what a property, another descriptor or `__getattr__` would make is not known."""
    if owner is _UNKNOWN or isinstance(owner, torch.Tensor):
        return _UNKNOWN
    if isinstance(owner, nn.Module):
        if name == "training":
            return True
        for table in ("_parameters", "_buffers", "_modules"):
            if name in (held := vars(owner).get(table, {})):
                return held[name]
    if isinstance(owner, EnumMeta):
        return owner.__members__.get(name, _UNKNOWN)
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return MethodType(found.__func__, owner if isinstance(owner, type) else type(owner))
    if isinstance(found, FunctionType):
        is_own = isinstance(owner, type | ModuleType) or name in getattr(owner, "__dict__", {})
        return found if is_own else MethodType(found, owner)
    return _UNKNOWN if hasattr(type(found), "__get__") and not isinstance(found, MethodType) else found


def _call(node: ast.Call, scope: _Scope, module: nn.Module, is_certain: bool) -> SdpaCall:
    by_name = {word.arg: word.value for word in node.keywords}
    is_listed = None not in by_name and not any(isinstance(one, ast.Starred) for one in node.args)

    def given(name: str, default: Any) -> Any:
        position = _POSITIONS.get(name, len(node.args))
        if name in by_name:
            return scope.value(by_name[name])
        if not is_listed:
            return _UNKNOWN
        return scope.value(node.args[position]) if position < len(node.args) else default

    mask, dropout = given("attn_mask", None), given("dropout_p", 0.0)
    causal, grouped = given("is_causal", False), given("enable_gqa", False)
    return SdpaCall(
        module,
        causal if isinstance(causal, bool) else None,
        None if mask is _UNKNOWN else mask is not None,
        grouped if isinstance(grouped, bool) else None,
        float(dropout) if type(dropout) in (bool, int, float) else None,
        is_certain,
    )
