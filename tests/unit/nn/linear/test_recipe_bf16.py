"""A layer that is in bf16 for a while is an nn.Linear, bit for bit, in the same module."""

from __future__ import annotations

import copy

import pytest
import torch
from support.linears import RECIPES, convert
from torch import Tensor, nn

from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipes import Bf16Recipe


def gradients(model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    for p in model.parameters():
        p.grad = None
    out = model(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def switch(model: nn.Module, *names: str) -> None:
    for fqn, module in model.named_modules():
        if isinstance(module, Fp8Linear) and (not names or fqn in names):
            module.fp8_recipe = Bf16Recipe(module.fp8_recipe)


@pytest.mark.parametrize(("recipe", "dtype"), zip(RECIPES, [torch.bfloat16, torch.float32] * 3, strict=False))
def test_it_computes_what_nn_linear_computes(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 96), nn.GELU(), nn.Linear(96, 80, bias=False)).to(dtype)
    stock = copy.deepcopy(model)
    history = convert(model, recipe=recipe, backend="reference")
    x, grad = torch.randn(64, 160).to(dtype), torch.randn(64, 80).to(dtype)
    in_fp8 = gradients(model, x, grad)[0]
    switch(model)
    if history is not None:
        history.amax_local.zero_()
    in_bf16 = gradients(model, x, grad)
    expected = gradients(stock, x, grad)
    for ours, theirs in zip(in_bf16, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-5)
        assert ours.dtype == theirs.dtype
    assert not torch.equal(in_fp8, in_bf16[0])
    if history is not None:  # amaxes are recorded all the same
        assert float(history.amax_local[0]) == float(x.abs().max())
        assert float(history.amax_local[3]) == float(grad.abs().max())
        assert bool((history.amax_local > 0).all())
