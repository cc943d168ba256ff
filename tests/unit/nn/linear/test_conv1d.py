"""A Conv1D in FP8 is the linear with the transposed weight: to the bit in both directions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.linears import attach_payload
from support.linears import convert as in_fp8
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Conv1D
from fp8_ds.nn.plan.convert import apply_plan, revert
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


def pair(num_in: int = 48, num_out: int = 80) -> tuple[nn.Linear, Any]:
    """A linear and a Conv1D with its numbers, bf16."""
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out).bfloat16()
    conv = Conv1D(num_out, num_in).bfloat16()
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    return linear, conv


def train(layer: Any, steps: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients; the second step has the scales of the first with delayed scaling."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(3, 7, 48, generator=generator).bfloat16().requires_grad_()
        layer.zero_grad()
        output = layer(x)
        output.backward(torch.randn(output.shape, generator=generator).bfloat16())
        if (history := getattr(layer, "history", None)) is not None:
            history.update(history.amax_local.clone())
        weight_grad = layer.weight.grad
        found += [output.detach(), x.grad, weight_grad, layer.bias.grad]
    return found


def convert(module: Any, **keys: Any) -> Any:
    module.history = in_fp8(nn.ModuleDict({"layer": module}), **keys)
    return module


@pytest.mark.parametrize(
    ("recipe", "backend", "grad_dtype"), [("tensorwise", "torch", "e5m2"), ("delayed", "reference", "e4m3")]
)
def test_outputs_and_gradients_are_the_linears(recipe: str, backend: str, grad_dtype: str) -> None:
    linear, conv = pair()
    for module in (linear, conv):
        convert(module, recipe=recipe, backend=backend, grad_dtype=grad_dtype)
    assert type(conv) is Fp8Conv1D
    for k, (expected, found) in enumerate(zip(train(linear), train(conv), strict=True)):
        expected = expected.t() if k % 4 == 2 else expected
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)  # sums in another order: one bf16 step
        assert (found == expected).float().mean() > 0.99


def test_bytes_beside_the_parameter_are_read_as_they_are_stored_and_what_does_not_fit_is_refused() -> None:
    linear, conv = pair()
    for module in (convert(linear), convert(conv)):
        attach_payload(module)
    x = torch.randn(5, 48).bfloat16()
    with torch.no_grad():
        assert_bitwise(linear(x), conv(x))
    with pytest.raises(ValueError, match="48"):
        conv(torch.randn(3, 80).bfloat16())
    with pytest.raises(RuntimeError):
        conv(torch.randn(3, 48))
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(torch.randn(3, 48)).dtype == torch.bfloat16


def test_it_is_traced_without_a_break() -> None:
    conv = convert(pair()[1])
    expected = train(conv)
    conv.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(expected, train(conv), strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("cause", ["rowwise", "rowwise_with_gw_hp", "blockwise", "forward", "addmm"])
def test_scales_of_rows_and_replaced_functions_leave_it_in_bf16(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {}
    if cause in ("forward", "addmm"):
        owner, stock = {"forward": (Conv1D, Conv1D.forward), "addmm": (torch, torch.addmm)}[cause]
        monkeypatch.setattr(owner, cause, lambda *args: stock(*args))
    else:
        keys = {"recipe": cause}
    model = nn.ModuleDict({"a": pair()[1], "b": nn.Linear(48, 16)})
    first, second = make_plan(model, LinearConfig.model_validate(keys)).layers
    assert not first.converted and ("replaced" in first.reason) == (not keys) and second.converted


def test_a_reverted_one_is_a_conv1d_again_with_its_own_forward() -> None:
    _, conv = pair()
    model, config = nn.ModuleDict({"a": copy.deepcopy(conv), "b": nn.Linear(48, 16).bfloat16()}), LinearConfig()
    plan = make_plan(model, config)
    assert [(row.out_features, row.in_features) for row in plan.layers] == [(80, 48), (16, 48)]
    apply_plan(model, plan, config, "cpu")
    assert not revert(model, plan, ["a"], "small").layers[0].converted
    assert type(model["a"]) is Conv1D and "in_features" not in vars(model["a"])
    x = torch.randn(2, 48).bfloat16()
    assert_bitwise(model["a"](x), conv(x))
