"""The search for RMSNorms and SwiGLUs to fuse, and for linears that read one tensor, in the source of `forward`.

A name stands for the expression that was assigned to it last. Values that cannot be followed have no readers; nothing
is guessed from names. The source is read and not run: `deepspeed.initialize` has no inputs for a forward, and one on
made-up inputs would run a user's code, its random numbers, counters and collectives.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fp8_ds.config import ActivationsConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.fused.mlp import FusedSwiglu, SwigluNames, attribute_at, has_hooks, is_silu
from fp8_ds.nn.fused.module import FusedModule, Producer
from fp8_ds.nn.fused.norm import FusedRMSNorm, arithmetic_of, is_candidate
from fp8_ds.nn.linear.fp8_linear import Fp8Linear

_MAX_NODES = 200  # of an expression: a SwiGLU has some 30
_OTHER_FORM = "its forward is not seen to be down(silu(gate(x)) * up(x))"
_NORM, _SWIGLU = "norm", "SwiGLU"
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj"}
_RECOGNISED = "modules with a weight and an eps; modules that return down(silu(gate(x)) * up(x)): docs/activations.md"


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


def find_swiglu(module: nn.Module) -> SwigluNames | str:
    """Return its linears if the source of its forward is `down(silu(gate(x)) * up(x))`; else why that is not seen."""
    function: Any = type(module).forward
    if "forward" in vars(module):
        return "its forward was replaced"
    if hasattr(function, "__wrapped__"):
        return "its forward is decorated"
    flow = flow_of(module)
    found = None if flow is None or len(flow.names) != 2 else _swiglu(flow.expression, *flow.names)
    if flow is None or found is None:
        return _OTHER_FORM
    gate, up, down = names = found.group("gate", "up", "down")
    if len(set(names)) < len(names) or not all(isinstance(module._modules.get(name), nn.Linear) for name in names):
        return _OTHER_FORM
    owner, *path = found["activation"].split(".")
    is_own = owner == flow.names[0]
    activation = attribute_at(module if is_own else function.__globals__.get(owner), path)
    if not is_silu(activation) or has_hooks(activation):
        return "its activation is not known to be SiLU"
    return SwigluNames(gate, up, down, tuple(path) if is_own else ())


def _swiglu(text: str, me: str, x: str) -> re.Match[str] | None:
    """Match the names of its parts, if `text` returns a SwiGLU of `x` by attributes of `me`."""
    gate, up = rf"(?P<activation>[\w.]+)\({me}\.(?P<gate>\w+)\({x}\)\)", rf"{me}\.(?P<up>\w+)\({x}\)"
    forms = (rf"return {me}\.(?P<down>\w+)\({one} \* {other}\)" for one, other in ((gate, up), (up, gate)))
    return next((found for form in forms if (found := re.fullmatch(form, text))), None)


@dataclass(frozen=True)
class Fusion:
    """The RMSNorms and SwiGLUs of a model, in module order: kinds of those fused, (name, reason) of those left."""

    fused: list[str]
    left: list[tuple[str, str]]

    def describe(self) -> str:
        """Say in one line what is fused, and what is left with the reason."""
        if not self.fused and not self.left:
            return f"fp8: fused nothing: no RMSNorm and no SwiGLU was found ({_RECOGNISED})"
        counts = [(self.fused.count(kind), kind) for kind in (_NORM, _SWIGLU)]
        text = "fp8: fused " + " and ".join(f"{num} {kind}{'' if num == 1 else 's'}" for num, kind in counts)
        return f"{text}; left: {', '.join(by_reason(self.left))}" if self.left else text


def fuse_producers(model: nn.Module, activations: ActivationsConfig) -> Fusion:
    """Fuse the RMSNorms and SwiGLUs that FP8 linears read with the cast; all else is untouched.

    Call it before DeepSpeed puts its hooks on the model: a SwiGLU with a hook is left alone.

    Raises:
        ConfigError: the model is fused already.
    """
    places: dict[nn.Module | None, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[child].append((parent, name))
    fusion = Fusion([], [])
    changes: list[Callable[[], None]] = []
    for fqn, module in model.named_modules():
        kind: str
        fuse: Any
        found: Any
        if isinstance(module, FusedModule):
            raise ConfigError(f"model: expected no fused module yet, got one at {fqn!r}. Fuse a model once only.")
        if is_candidate(module) and places[module]:
            kind, fuse, readers = _NORM, FusedRMSNorm.fuse, linears_that_read(*places[module][0])
            found = arithmetic_of(module) if len(places[module]) == 1 else "used in several places"
        else:
            kind, fuse, found = _SWIGLU, FusedSwiglu.fuse, find_swiglu(module)
            if isinstance(found, str) and not module._modules.keys() >= _MLP_NAMES:
                continue
            readers = [] if isinstance(found, str) else [getattr(module, found.down)]
        producer = _producer(readers, activations)
        reason = next((one for one in (found, producer) if isinstance(one, str)), None)
        if reason is None:
            fusion.fused.append(kind)
            changes.append(partial(fuse, module, found, producer))
        else:
            fusion.left.append((fqn, reason))
    for change in changes:  # only now: the source of a fused module's forward is another one
        change()
    return fusion


def _producer(readers: Sequence[nn.Module], activations: ActivationsConfig) -> Producer | str:
    fp8 = [linear for linear in readers if isinstance(linear, Fp8Linear)]
    recipes = sorted({linear.fp8_recipe.name for linear in fp8})
    if not fp8:
        return "no FP8 linear is seen to read it"
    if len(recipes) > 1:
        return f"read by recipes {' and '.join(recipes)}"
    return Producer(tuple(fp8), activations.nonlinear)


def by_reason(left: Iterable[tuple[str, str]]) -> list[str]:
    """Return one text per reason, `a.b and 2 more (its forward was replaced)`, of (name, reason) pairs."""
    names: dict[str, list[str]] = {}
    for fqn, reason in left:
        names.setdefault(reason, []).append(fqn)
    more = {reason: f" and {len(fqns) - 1} more" if len(fqns) > 1 else "" for reason, fqns in names.items()}
    return [f"{fqns[0]}{more[reason]} ({reason})" for reason, fqns in names.items()]
