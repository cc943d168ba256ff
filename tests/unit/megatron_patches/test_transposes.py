"""Transposes of FP8 weights outlive no backward; over linears that ask for them as Transformer Engine's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from megatron.core import fp8_utils

from fp8_ds.errors import SeamError
from megatron_patches import transposes


class Quantizer:
    columnwise_usage = True

    def set_usage(self, *, columnwise: bool) -> None:
        self.columnwise_usage = columnwise


class Weight(torch.Tensor):
    """What a Float8Tensor of Transformer Engine 2.11 does about its transpose."""

    made = 0
    _transpose: Tensor | None
    _quantizer: Quantizer

    def create(self) -> None:
        self._transpose = self.detach().as_subclass(torch.Tensor).t().contiguous()
        Weight.made += 1

    def update_usage(self, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and self._transpose is None:
            self.create()
        if columnwise_usage is False:
            self._transpose = None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, seen: list[int], all_weights: list[Weight]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen, ctx.all_weights = seen, all_weights
        return x @ weight.as_subclass(torch.Tensor).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        weight.update_usage(columnwise_usage=True)
        ctx.seen.append(kept(ctx.all_weights))
        return grad @ weight._transpose.t(), grad.t() @ x, None, None


class Linear(nn.Module):
    def __init__(self, size: int, seen: list[int], all_weights: list[Weight]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size).as_subclass(Weight))
        self.weight._quantizer = Quantizer()  # type: ignore[assignment]
        self.weight._transpose = None  # type: ignore[assignment]
        all_weights.append(self.weight)  # type: ignore[arg-type]
        self.seen, self.all_weights = seen, all_weights

    def forward(self, x: Tensor) -> Tensor:
        asked = self.weight._quantizer.columnwise_usage  # type: ignore[union-attr]
        self.weight.update_usage(columnwise_usage=True if asked else None)  # type: ignore[operator]
        return _Product.apply(x, self.weight, self.seen, self.all_weights).tanh()  # type: ignore[no-any-return]


def kept(weights: list[Weight]) -> int:
    return sum(weight._transpose is not None for weight in weights)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Weight, raising=False)
    yield


def build() -> tuple[nn.Sequential, list[Weight], list[int]]:
    """(model, its weights, how many had a transpose in each product's backward so far)."""
    torch.manual_seed(0)
    seen: list[int] = []
    weights: list[Weight] = []
    return nn.Sequential(*(Linear(8, seen, weights) for _ in range(3))), weights, seen


def train(model: nn.Module, num_micro: int = 2, recompute: bool = False) -> list[Tensor]:
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for micro in range(num_micro):
        out = checkpoint(model, x * (micro + 1), use_reentrant=True) if recompute else model(x * (micro + 1))
        out.sum().backward()
    return [x.grad, *(p.grad.as_subclass(torch.Tensor) for p in model.parameters())]  # type: ignore[list-item,union-attr]


@pytest.mark.parametrize("recompute", [False, True])
def test_one_weight_at_a_time_has_a_transpose_and_gradients_are_the_same(recompute: bool) -> None:
    stock, all_kept, seen_by_stock = build()
    expected = train(stock, recompute=recompute)
    assert kept(all_kept) == 3 and max(seen_by_stock) == 3
    model, weights, seen = build()
    transposes.drop_all([model])
    Weight.made = 0
    for one, other in zip(train(model, recompute=recompute), expected, strict=True):
        assert torch.equal(one, other)
    assert seen == [1] * 6 and kept(weights) == 0
    assert Weight.made == 6, "one for each product and micro-batch, none in forwards"


def test_what_is_there_before_goes_and_neither_forwards_nor_gathers_make_others() -> None:
    model, weights, _ = build()
    train(model, 1)
    transposes.drop_all([model])
    assert kept(weights) == 0
    for weight in weights:
        weight._quantizer = Quantizer()  # a new recipe's
    model(torch.ones(1, 8))
    assert kept(weights) == 0
    others, gathered = build()[1], list[Weight]()
    transposes.without_ours(gathered.extend)([*weights, *others])
    assert [id(weight) for weight in gathered] == [id(weight) for weight in others]


def test_another_transformer_engine_is_refused() -> None:
    model, weights, _ = build()
    del weights[1]._quantizer
    with pytest.raises(SeamError, match=r"Weight\._quantizer: .* got none"):
        transposes.drop_all([model])
