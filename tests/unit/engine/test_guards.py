"""Guards on what is ours and stays as it is are left out of compiled graphs; all others hold."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.engine import guards
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.testing import assert_bitwise

RECIPE = "L['self']._modules['q_proj'].fp8_recipe"
OURS = "G['__import_fp8_ds_dot_nn_dot_recipe']"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        (f"{OURS}.Quantized", "CLASS_MATCH", True),
        (f"{OURS}.Quantized.__dataclass_fields__['rows'].name", "CONSTANT_MATCH", True),
        (f"{OURS}.torch", "DUPLICATE_INPUT", True),
        (f"{OURS}.torch", "MODULE_MATCH", True),
        (f"{OURS}.torch.nn.functional.scaled_dot_product_attention", "BUILTIN_MATCH", False),
        (f"{OURS}.nn.functional.silu", "CLOSURE_MATCH", False),
        ("G['__import_transformers_dot_activations'].nn", "DUPLICATE_INPUT", False),
        (f"{RECIPE}.history", "DUPLICATE_INPUT", True),
        (f"{RECIPE}.grad_format", "DUPLICATE_INPUT", True),
        (f"{RECIPE}.history.ready", "CONSTANT_MATCH", False),
        (f"{RECIPE}.leader", "DUPLICATE_INPUT", False),
        (RECIPE, "TYPE_MATCH", False),
        (f"{RECIPE}.backend", "EQUALS_MATCH", False),
        (f"dict(type({RECIPE}).__mro__[2].__dict__)['is_turned']", "CONSTANT_MATCH", True),
        (f"type({RECIPE}).__mro__[2].quantize_input", "CLOSURE_MATCH", True),
        ("type(L['self'])", "ID_MATCH", False),
        ("L['x']", "TENSOR_MATCH", False),
    ],
)
def test_what_stays_as_it_is(name: str, kind: str, expected: bool) -> None:
    assert guards.is_fixed(name, kind) == expected


class Recipe:
    """As one of ours."""

    __module__ = "fp8_ds.nn.recipe"
    is_turned = False

    def quantize(self) -> None: ...

    @property
    def max(self) -> float:
        return 1.0


class OwnModule(nn.Module):
    __module__ = "fp8_ds.nn.linear"


class Users(Recipe):
    __module__ = "users"


@pytest.mark.parametrize(
    ("value", "attribute", "kind", "expected"),
    [
        (Recipe(), "quantize", "NOT_PRESENT_IN_GENERIC_DICT", True),
        (Recipe(), "max", "NOT_PRESENT_IN_GENERIC_DICT", True),
        (Recipe(), "is_turned", "NOT_PRESENT_IN_GENERIC_DICT", False),  # a class's value, which an object may replace
        (Recipe(), "other", "NOT_PRESENT_IN_GENERIC_DICT", False),
        (Recipe(), "quantize", "HASATTR", False),
        (OwnModule(), "forward", "NOT_PRESENT_IN_GENERIC_DICT", False),
        (Users(), "quantize", "NOT_PRESENT_IN_GENERIC_DICT", False),
    ],
)
def test_methods_of_ours_stay_where_they_are(value: Any, attribute: str, kind: str, expected: bool) -> None:
    made = SimpleNamespace(create_fn=functools.partial(print, attr=attribute))
    guard = SimpleNamespace(name=RECIPE, guard_type=kind, has_value=True, value=value, orig_guard=made)
    assert guards.is_on_a_method(guard) == expected
    guard.has_value = False
    assert not guards.is_on_a_method(guard)


def test_options_are_the_users_own_with_the_filter_behind_theirs() -> None:
    seen: list[int] = []

    def first(entries: Any) -> list[bool]:
        seen.append(len(entries))
        return [entry.name != "drop" for entry in entries]

    given = {"dynamic": False, "options": {"epilogue_fusion": True, "guard_filter_fn": first}}
    made = guards.without_fixed(given)
    assert given["options"]["guard_filter_fn"] is first  # the user's dictionary is as it was
    assert (made["dynamic"], made["options"]["epilogue_fusion"]) == (False, True)
    entries = [SimpleNamespace(name=name, guard_type="TENSOR_MATCH") for name in ("drop", "x", OURS)]
    assert made["options"]["guard_filter_fn"](entries) == [False, True, False] and seen == [3]
    with_mode = {"mode": "reduce-overhead"}
    assert guards.without_fixed(with_mode) is with_mode
    for plain in ("default", None):
        assert guards.without_fixed({"mode": plain, "dynamic": True}).keys() == {"dynamic", "options"}


class Stock:
    """What an engine compiles by."""

    module, optimizer = nn.Linear(2, 2), None
    _fp8_hooks: ClassVar[list[Any]] = []

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def compile(self, backend: str = "inductor", compile_kwargs: Any = {}, schedule: Any = None) -> None:  # noqa: B006
        self.given = (backend, compile_kwargs, schedule)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("eager", {"dynamic": False}), {"schedule": 1})], ids=str)
def test_an_engine_in_fp8_compiles_with_the_filter_and_more_graphs_and_another_does_not(args: Any, kwargs: Any) -> None:
    from fp8_ds.engine.engine import RECOMPILE_LIMIT, Fp8Engine

    plain = Stock()
    plain.compile(*args, **kwargs)
    for is_in_fp8 in (False, True):
        engine: Any = object.__new__(type("Engine", (Fp8Engine, Stock), {"fp8": object() if is_in_fp8 else None}))
        with torch._dynamo.config.patch(recompile_limit=8):
            engine.compile(*args, **kwargs)
            assert torch._dynamo.config.recompile_limit == (RECOMPILE_LIMIT if is_in_fp8 else 8)
        backend, compile_kwargs, schedule = engine.given
        options = {"options": compile_kwargs["options"]} if is_in_fp8 else {}
        assert (backend, compile_kwargs, schedule) == (plain.given[0], plain.given[1] | options, plain.given[2])
        assert is_in_fp8 == isinstance(options.get("options", {}).get("guard_filter_fn"), guards._Filter)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def converted(recipe: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    config = LinearConfig(recipe=recipe, filter_fqns=(), **more)
    apply_plan(model, make_plan(model, config), config, torch.device("cpu"))
    return model


def test_a_graph_with_fewer_guards_has_its_bits_and_is_made_anew_for_another_recipe() -> None:
    torch._dynamo.reset()
    model, counts = converted("tensorwise"), []
    options = guards.without_fixed({})["options"]
    filtered = options["guard_filter_fn"]

    def counted(entries: Any) -> list[bool]:
        kept = filtered(entries)
        kinds = Counter(entry.guard_type for entry, one in zip(entries, kept, strict=True) if not one)
        counts.append((len(kept), sum(kept), kinds))
        return kept

    compiled = torch.compile(model, backend="aot_eager", options={"guard_filter_fn": counted})
    x = torch.randn(16, 32)
    assert_bitwise(compiled(x), model(x))
    ((before, after, kinds),) = counts
    assert after < 0.7 * before and kinds["DUPLICATE_INPUT"] > 2 and kinds["NOT_PRESENT_IN_GENERIC_DICT"] > 20
    assert_bitwise(compiled(x), model(x))
    assert len(counts) == 1  # no graph more
    for name, other in converted("rowwise").named_children():
        getattr(model, name).fp8_recipe = other.fp8_recipe
    assert_bitwise(compiled(x), model(x))
    assert len(counts) == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_graph_with_gradients_in_one_format_does_not_serve_a_model_with_another(recipe: str) -> None:
    """torch has no guard on what is a model's and a constant of a module as well."""
    torch._dynamo.reset()
    x, found = torch.randn(16, 32), {}
    for grad_dtype in ("e4m3", "e5m2", "e4m3"):
        expected = gradients(converted(recipe, grad_dtype=grad_dtype), x, compiles=False)
        found[grad_dtype] = gradients(converted(recipe, grad_dtype=grad_dtype), x, compiles=True)
        assert_bitwise(found[grad_dtype], expected)
    assert not torch.equal(found["e4m3"], found["e5m2"])


def gradients(model: nn.Module, x: torch.Tensor, *, compiles: bool) -> torch.Tensor:
    """Of the first weight."""
    run = torch.compile(model, backend="aot_eager", **guards.without_fixed({})) if compiles else model
    run(x).square().sum().backward()
    gradient = model.get_parameter("up.weight").grad
    assert gradient is not None
    return gradient
