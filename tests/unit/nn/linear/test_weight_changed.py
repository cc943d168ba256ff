"""A weight that is changed between a forward and its backward stops the backward, as it does for nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.linears import convert, fp8_of
from support.models import SwigluMlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds import Fp8AdamW
from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.nn.moe.products import Groups, grouped_linear

WIDTH = 128


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        groups = Groups.of(torch.arange(2 * len(x)).view(-1, 2) % 3, 3)
        recipe = TensorwiseRecipe(LinearConfig())
        return groups.collect(grouped_linear(x, self.weight, groups, recipe, is_dispatched=False)).sum(1)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()


def fused_mlp() -> nn.Module:
    mlp = SwigluMlp(WIDTH, 2 * WIDTH).bfloat16()
    convert(mlp)
    fuse_producers(mlp, ActivationsConfig(fused=True))
    return mlp


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nn.Linear": linear,
    **{recipe: lambda recipe=recipe: fp8_of(linear(), recipe) for recipe in ("tensorwise", "rowwise", "blockwise")},
    "SwiGLU": fused_mlp,
    "experts": lambda: Experts().bfloat16(),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return LAYERS[name](), torch.randn(32, WIDTH).bfloat16()


@torch.no_grad()
def copy_into(p: nn.Parameter) -> None:
    p.copy_(2 * p)


def adamw(p: nn.Parameter) -> None:
    Fp8AdamW([p], lr=0.5).step()


@pytest.mark.parametrize(("name", "write"), zip(LAYERS, [copy_into, adamw] * 3, strict=True))
def test_a_backward_after_its_weight_was_changed_stops(name: str, write: Any) -> None:
    for index in range(len(list(LAYERS[name]().parameters()))):
        layer, x = make(name)
        y = layer(x.requires_grad_())
        grads = []
        for _ in range(2):  # a weight that stays gives the same gradients again
            layer.zero_grad()
            y[:16].float().pow(2).sum().backward(retain_graph=True)
            grads.append([p.grad.clone() for p in layer.parameters()])
        assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*grads, strict=True))
        write(list(layer.parameters())[index])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y[16:].float().pow(2).sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_computes_again_with_the_weight_as_it_is(name: str) -> None:
    layer, x = make(name)
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    for p in layer.parameters():
        copy_into(p)
    y.float().sum().backward()
    given = x.detach().clone().requires_grad_()
    layer(given).float().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, given.grad)
