"""Which modules of a model compile one by one with gradient release, however it holds its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from fp8_ds.compiled_parts import compile_as_trained
from fp8_ds.counted_run import read_run
from fp8_ds.counting_backend import CountingBackend
from fp8_ds.errors import ConfigError
from fp8_ds.footprint import Footprint, estimate
from fp8_ds.model_spec import ModelSpec

WIDTH = 64


class Block(nn.Module):
    """A graph of it keeps less for the backward than eager does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(self.norm(x))).square().sin())


class OfExperts(nn.Module):
    """A layer that has a list of its own, and a matrix beside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        for expert in self.experts:
            x = expert(x)
        return x


class Listed(nn.ModuleList):
    """One without a forward, as ModuleList itself."""


class Model(nn.Module):
    """Args: parts: modules by name, called in this order; containers that cannot be called, entry by entry."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.embed_proj = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        for name, part in parts.items():
            self.add_module(name, part)
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens[:, :-1]
        for part in self.children():
            x = _called(part, x)
        return functional.cross_entropy(x.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _called(part: nn.Module, x: Tensor) -> Tensor:
    if type(part).forward is not nn.Module.forward:
        return part(x)
    for child in part.children():
        x = _called(child, x)
    return x


def blocks(num: int = 4) -> list[nn.Module]:
    return [Block() for _ in range(num)]


def named(modules: list[nn.Module]) -> dict[str, nn.Module]:
    return {f"h{number}": module for number, module in enumerate(modules)}


def wrapped() -> nn.Module:
    """A model of one Sequential, its final norm and head in it."""
    return nn.Sequential(nn.Embedding(128, WIDTH), *blocks(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))


def listed() -> nn.Module:
    return Model(layers=nn.ModuleList(blocks()))


HELD: dict[str, Callable[[], nn.Module]] = {
    "list": listed,
    "list-of-a-class": lambda: Model(layers=Listed(blocks())),
    "sequential": lambda: Model(layers=nn.Sequential(*blocks())),
    "dict": lambda: Model(layers=nn.ModuleDict(named(blocks()))),
    "dict-with-a-list": lambda: Model(core=nn.ModuleDict({"drop": nn.Dropout(0.0), "h": nn.ModuleList(blocks())})),
    "two-lists": lambda: Model(first=nn.ModuleList(blocks(2)), second=nn.ModuleList(blocks(2))),
    "list-of-lists": lambda: Model(stages=nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(2))),
    "list-of-sequentials": lambda: Model(stages=nn.ModuleList(nn.Sequential(*blocks(2)) for _ in range(2))),
}


def compiled(model: nn.Module) -> list[str]:
    compile_as_trained(model, CountingBackend(), stage=2, releases=True, is_fp8=False)
    return [type(part).__name__ for part in model.modules() if part._compiled_call_impl is not None]


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_all_layers_compile_and_the_norm_beside_them_and_no_other(make: Callable[[], nn.Module]) -> None:
    assert compiled(make()) == ["Block"] * 4 + ["LayerNorm"]


def test_a_model_that_is_one_sequential_compiles_its_layers_and_its_norm() -> None:
    assert compiled(nn.Sequential(wrapped())) == ["Block"] * 4 + ["LayerNorm"]


def test_a_list_within_a_layer_is_of_that_layer() -> None:
    assert compiled(Model(layers=nn.Sequential(OfExperts(), OfExperts()))) == ["OfExperts"] * 2 + ["LayerNorm"]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "none": (lambda: Model(only=Block()), "got none"),
    "attributes": (lambda: Model(**named(blocks())), "got 4 Block outside of these"),
    "attributes-and-a-list": (
        lambda: Model(**named(blocks()), others=nn.ModuleList([OfExperts()])),
        "got 4 Block outside of these",
    ),
    "attributes-with-lists": (lambda: Model(a=OfExperts(), b=OfExperts()), "got 2 OfExperts outside of these"),
    "a-list-of-matrices": (lambda: Model(layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))), "got none"),
}


@pytest.mark.parametrize(("make", "got"), REFUSED.values(), ids=REFUSED)
def test_layers_that_are_not_in_a_container_are_refused_and_none_is_compiled(
    make: Callable[[], nn.Module], got: str
) -> None:
    model = make()
    with pytest.raises(ConfigError, match=f"layers in an nn.ModuleList, nn.ModuleDict or nn.Sequential, .* {got}"):
        compiled(model)
    assert all(part._compiled_call_impl is None for part in model.modules())


def footprint(make: Callable[[], nn.Module], is_compiled: bool) -> Footprint:
    config: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
    config["fp8"] = {"enabled": True, "optimizer": {"states": "fp8", "release": True}}
    return estimate(ModelSpec("tests", function=make), read_run(config, 1, 2, 256, compiled=is_compiled))


@pytest.mark.slow
def test_the_estimate_is_the_same_however_the_layers_are_held() -> None:
    expected = footprint(listed, True)
    assert expected.activations < 0.75 * footprint(listed, False).activations
    for name in ("sequential", "two-lists", "list-of-lists"):
        assert footprint(HELD[name], True) == expected, name
