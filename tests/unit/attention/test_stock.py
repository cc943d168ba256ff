"""FlexAttention stays compiled: each shape has compilations of its own, and torch's limit is an error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from fp8_ds.attention import Packing, attention, stock
from fp8_ds.testing import assert_bitwise

LIMIT = 2


class Graphs:
    """A torch.compile backend that runs graphs as they are, and counts what it was given and what ran."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.compiled += 1

        def run(*tensors: Tensor) -> Any:
            self.ran += 1
            return graph.forward(*tensors)

        return run


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Flex is compiled on CPU too, by a backend that counts; torch's limit is LIMIT compilations."""
    counting = Graphs()
    torch._dynamo.reset()
    stock._compiled_flex.cache_clear()
    monkeypatch.setattr(stock, "_is_compiled_here", lambda q: True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield counting
    stock._compiled_flex.cache_clear()
    torch._dynamo.reset()


def qkv(num_tokens: int) -> list[Tensor]:
    return [torch.randn(1, num_tokens, heads, 16) for heads in (4, 2, 2)]


def test_flex_is_compiled_for_more_lengths_than_torchs_limit(graphs: Graphs) -> None:
    lengths = [8 * (1 + i) for i in range(LIMIT + 2)]
    for num_tokens in lengths + lengths:
        q, k, v = qkv(num_tokens)
        ours = attention(q, k, v, backend="flex", causal=True)
        exact = attention(q, k, v, backend="reference", causal=True)
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
    assert (graphs.compiled, graphs.ran) == (len(lengths), 2 * len(lengths))


def test_flex_is_compiled_once_for_any_packing_of_as_many_tokens(graphs: Graphs) -> None:
    q, k, v = (x[0] for x in qkv(24))
    outputs = []
    for ends in ([0, 5, 24], [0, 7, 24], [0, 3, 9, 24], [0, 24]):
        packing = Packing.of(torch.tensor(ends, dtype=torch.int32), 24)
        outputs.append(attention(q, k, v, backend="flex", causal=True, packing=packing))
        assert_bitwise(outputs[-1][:3], outputs[0][:3])
    assert not torch.equal(outputs[0], outputs[1])
    assert (graphs.compiled, graphs.ran) == (1, 4)


def test_flex_raises_where_torch_compiles_one_shape_no_more(graphs: Graphs) -> None:
    """Of one shape, each kind of strides is a compilation."""
    _, k, v = qkv(8)
    for i in range(LIMIT + 1):
        q = torch.randn(1, 8, 4, 16 * (i + 1))[..., :16]
        with pytest.raises(FailOnRecompileLimitHit) if i == LIMIT else nullcontext():
            attention(q, k, v, backend="flex", causal=True)
    assert graphs.compiled == graphs.ran == LIMIT


def test_many_shapes_of_flex_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    stock._compiled_flex.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = []
        for num_tokens in [*range(12), 3]:
            stock._compiled_flex(num_tokens)
            counts.append(len(caught))
    stock._compiled_flex.cache_clear()
    assert counts == [0] * 8 + [1] * 5
    assert "few lengths" in str(caught[0].message)
