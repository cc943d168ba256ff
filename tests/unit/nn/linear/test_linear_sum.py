"""A linear whose weight is a sum with an adapter: PEFT's `target_parameters`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.linears import RECIPES, convert
from support.memory import freeing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipes import Bf16Recipe
from fp8_ds.testing import assert_bitwise


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x)


def in_fp8(model: nn.Module, recipe: str) -> None:
    convert(model, recipe=recipe, frozen="fp8", filter_fqns=["lora_"])


def adapted(recipe: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """(a model with PEFT's adapter on its linear, that Fp8Linear, the adapter's parameters), which are not 0."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["q_proj.weight"]))
    adapter = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for p in adapter.values():
        nn.init.normal_(p, std=0.3)
    in_fp8(model, recipe)
    (linear,) = (module for module in model.modules() if isinstance(module, Fp8Linear))
    return model, linear, adapter


def read_by(linear: Any, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Filled with the weights that `linear` computes with, from now on."""
    seen: list[weakref.ref[Tensor]] = []
    before = Fp8Linear.product

    def product(self: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(weakref.ref(self.weight))
        return before(self, input, bias)

    monkeypatch.setattr(Fp8Linear, "product", product)
    return seen


def run(function: Callable[[Tensor], Tensor], x: Tensor, adapter: dict[str, Tensor]) -> list[Tensor]:
    for p in adapter.values():
        p.grad = None
    given = x.clone().requires_grad_()
    output = function(given)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype))
    grads = [given.grad, *(p.grad for p in adapter.values())]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(("recipe", "is_bf16_now"), [*((recipe, False) for recipe in RECIPES), ("delayed", True)])
def test_a_sum_computes_as_a_weight_of_its_values_and_its_gradient_reaches_the_adapter(
    recipe: str, is_bf16_now: bool
) -> None:
    model, linear, adapter = adapted(recipe)
    plain = Model()
    with torch.no_grad():
        lora_a, lora_b = adapter.values()
        (wrapper,) = (module for module in model.modules() if hasattr(module, "get_delta_weight"))
        plain.q_proj.weight.copy_(linear.weight + wrapper.get_delta_weight("default"))
        plain.q_proj.bias.copy_(linear.bias)
    in_fp8(plain, recipe)
    for one in (linear, plain.q_proj):
        if is_bf16_now:
            one.fp8_recipe = Bf16Recipe(one.fp8_recipe)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    output, grad_x, grad_a, grad_b = run(model, x, adapter)
    expected, expected_grad_x = run(plain, x, {})
    assert_bitwise(output, expected)
    assert_bitwise(grad_x, expected_grad_x)
    grad = plain.q_proj.weight.grad
    assert grad is not None
    for got, want in ((grad_a, 2 * lora_b.T @ grad.float()), (grad_b, 2 * grad.float() @ lora_a.T)):
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * want.detach().abs().max().item())
    assert linear.weight.grad is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_weight_that_is_a_sum_is_not_kept_until_the_backward(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint frees what the graph has saved, and nothing else."""
    model, linear, adapter = adapted(recipe)
    seen = read_by(linear, monkeypatch)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    expected = run(model, x, adapter)

    for use_reentrant in (None, False, True):
        function = model if use_reentrant is None else partial(checkpoint, model, use_reentrant=use_reentrant)
        for got, want in zip(run(freeing(function, seen), x, adapter), expected, strict=True):
            assert_bitwise(got, want)
    assert len(seen) == 1 + 1 + 2 + 2
