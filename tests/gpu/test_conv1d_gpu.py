"""A Conv1D on CUDA is the linear with the transposed weight, by the tensor cores' products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


@pytest.mark.parametrize("grad_dtype", ["e5m2", "e4m3"])
@pytest.mark.parametrize("shape", [(768, 2304), (40, 24)], ids=str)
def test_outputs_and_gradients_are_the_linears(shape: tuple[int, int], grad_dtype: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(*shape, device="cuda", dtype=torch.bfloat16)
    conv = Conv1D(shape[1], shape[0]).to("cuda", torch.bfloat16)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    x = torch.randn(512, shape[0], device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(512, shape[1], device="cuda", dtype=torch.bfloat16)
    found = []
    for module in (linear, conv):
        model, config = nn.ModuleDict({"layer": module}), LinearConfig.model_validate({"grad_dtype": grad_dtype})
        apply_plan(model, make_plan(model, config), config, "cuda")
        given = x.clone().requires_grad_()
        output = module(given)
        output.backward(grad)
        weight_grad = module.weight.grad.t() if module is conv else module.weight.grad
        found.append((output, given.grad, weight_grad, module.bias.grad))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-2)
        assert (got == expected).float().mean() > 0.95
