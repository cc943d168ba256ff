"""Fused producers on CUDA: which norm torch has there, and what an MLP keeps."""

import pytest
import torch
from torch import nn

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.norm import arithmetic_of
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("eps", [1e-5, None])
def test_torchs_norm_is_recognised_on_this_device(eps):
    found = arithmetic_of(nn.RMSNorm(1024, eps=eps, device="cuda", dtype=torch.bfloat16))
    assert found in [(eps, "once"), *((torch.finfo(dtype).eps, "once") for dtype in (torch.float32, torch.bfloat16))]


def fused_mlp(nonlinear):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    stock = llama.LlamaMLP(llama.LlamaConfig(hidden_size=512, intermediate_size=1536))
    model, config = nn.ModuleDict({"mlp": stock.to("cuda", torch.bfloat16)}), LinearConfig(recipe="delayed")
    history = apply_plan(model, make_plan(model, config), config, "cuda")
    fuse_producers(model, ActivationsConfig(fused=True, nonlinear=nonlinear))
    history.update(torch.full_like(history.amax_local, 8.0))
    return model["mlp"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("nonlinear", "per_element"), [("bf16", 2), ("fp8", 1 + 4 / 128)])
def test_an_mlp_keeps_one_layout_of_its_input_and_gate_and_up(nonlinear, per_element, compiled):
    torch._dynamo.reset()
    mlp = fused_mlp(nonlinear)
    num_tokens, width, hidden = 8192, mlp.gate_proj.in_features, mlp.gate_proj.out_features
    function = torch.compile(mlp, fullgraph=True) if compiled else mlp
    x = torch.randn(num_tokens, width, device="cuda").bfloat16().requires_grad_()
    function(x * 1).sum().backward()  # whatever a first call leaves
    mlp.zero_grad()
    x.grad = None
    before = torch.cuda.memory_allocated()
    output = function(x * 1)
    kept = torch.cuda.memory_allocated() - before - output.nbytes
    weights = sum(p.numel() for p in mlp.parameters()) if compiled else 0  # without ZeRO a graph keeps their FP8
    assert kept - weights == pytest.approx(num_tokens * (width + 2 * per_element * hidden), rel=0.02)
