"""Graphs that allocate what inductor's code would: to the byte on small models, and by which modules compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.compiled_parts import compile_as_trained, mark_leaves
from fp8_ds.counting_backend import CountingBackend, _call_of
from fp8_ds.errors import ConfigError
from fp8_ds.rehearsal import Rehearsal, rehearse

ROWS, WIDTH = 64, 512


class Chain(nn.Module):
    """Nine pointwise operators between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(3):
            y = (y * 2 + 1).cos()
        return self.down(y)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chain() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).float().sum()


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind().bfloat16()


def loss(model: nn.Module) -> Tensor:
    return model(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)).float().sum()


def counted(kind: type[nn.Module], leaf_module: dict[str, Any] | None = None, **options: Any) -> Rehearsal:
    options = {"backend": CountingBackend(), "stage": 2, "releases": False, "is_fp8": True, **options}
    model = on_meta(kind)
    for child in model.children():
        mark_leaves(child, leaf_module or {})
    return rehearse(model, loss, lambda model: compile_as_trained(model, **options))


def test_a_chain_keeps_its_inputs_and_nothing_between_pointwise_operators() -> None:
    found = rehearse(on_meta(Chain), loss, lambda model: model.compile(backend=CountingBackend()))
    one = 2 * ROWS * WIDTH
    eager = rehearse(on_meta(Chain), loss)
    # Inputs of both products, and the first's result, of which the cosines' inputs are made again; and the loss.
    assert found.kept == 3 * one + 4
    assert eager.kept == (2 + 3) * one + 4
    assert found.moments[-1].num_gradients == eager.moments[-1].num_gradients == 2 * WIDTH * WIDTH


def test_gradients_of_a_whole_graph_are_there_at_once_and_those_of_layers_are_not() -> None:
    whole, by_layer = (counted(Layers, releases=releases) for releases in (False, True))
    weights = 2 * 6 * WIDTH * WIDTH
    assert whole.peak(lambda _: 0) >= weights
    assert by_layer.peak(lambda _: 0) < 0.8 * weights
    assert whole.moments[-1].num_gradients == by_layer.moments[-1].num_gradients


def test_under_zero_3_graphs_end_at_modules_and_a_leaf_is_one() -> None:
    numbers = []
    for leaf_module in (
        {},
        {"classes": ["NoSuch"]},
        {"classes": ["Chain"]},
        {"classes": f"{Chain.__module__}.Chain"},
        {"names": ["0", "1", "2"]},  # of what DeepSpeed is given: the children
    ):
        backend = CountingBackend()
        counted(Layers, backend=backend, stage=3, leaf_module=leaf_module)
        numbers.append(backend.num_graphs)
    apart, no_such, *same = numbers
    assert apart == no_such > same[0] > 0 and len(set(same)) == 1, numbers


def test_a_release_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a model with its layers in an nn\.ModuleList"):
        counted(Chain, releases=True)


def test_buffers_that_would_not_be_counted_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="buffers are made by empty_strided_cpu_pinned"):
        _call_of("def call(args):\n    return empty_strided_cpu_pinned((1,), (1,), None)\n")
