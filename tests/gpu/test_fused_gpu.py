"""Fused producers on CUDA: the kernels behind them, the bits of a decoder layer, what is kept, no waiting."""

import copy

import pytest
import torch
from torch import nn

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.norm import arithmetic_of
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
WIDTH, LENGTH = 512, 256


@pytest.mark.parametrize("eps", [1e-5, None])
def test_torchs_norm_is_recognised_on_this_device(eps):
    found = arithmetic_of(nn.RMSNorm(1024, eps=eps, device="cuda", dtype=torch.bfloat16))
    assert found in [(eps, "once"), *((torch.finfo(dtype).eps, "once") for dtype in (torch.float32, torch.bfloat16))]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=1536, num_attention_heads=4, num_key_value_heads=2
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.layer = llama.LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16)
        rotary = llama.LlamaRotaryEmbedding(config).cuda()
        positions = torch.arange(LENGTH, device="cuda")[None]
        self.positions = rotary(torch.empty(1, dtype=torch.bfloat16, device="cuda"), positions)

    def forward(self, x):
        return self.layer(x, position_embeddings=self.positions)


def make(recipe, fused=True, nonlinear="bf16"):
    model, config = Layer(), LinearConfig(recipe=recipe)
    history = apply_plan(model, make_plan(model, config), config, "cuda")
    if fused:
        fuse_producers(model, ActivationsConfig(fused=True, nonlinear=nonlinear))
    if history is not None:
        history.update(torch.full_like(history.amax_local, 8.0))
    return model


def inputs(seed):
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def run(model, x, grad):
    x = x.clone().requires_grad_()
    output = model(x * 1)
    output.backward(grad)
    found = {"output": output.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_linears_read_the_bytes_that_they_would_make_themselves(recipe):
    model = make(recipe)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, Fp8Linear):
            module.fp8_recipe.producer_scaling = lambda: None
    expected, got = (run(one, inputs(0), inputs(1) * 1e-3) for one in (plain, model))
    for name in ("output", *(name for name in got if "proj" in name)):
        assert_bitwise(expected[name], got[name])


def make_mlp(recipe, by_linears=False):
    """A fused MLP by itself; `by_linears`: it has a hook, so that its linears are called one by one."""
    mlp = make(recipe).layer.mlp
    if by_linears:
        mlp.up_proj.register_forward_hook(lambda *_: None)
    return mlp


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_is_one_function_with_the_bits_of_its_linears(recipe):
    expected, got = (run(make_mlp(recipe, by_linears), inputs(0), inputs(1) * 1e-3) for by_linears in (True, False))
    for name, value in expected.items():
        assert_bitwise(value, got[name])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("nonlinear", "per_element"), [("bf16", 2), ("fp8", 1 + 4 / 128)])
def test_an_mlp_keeps_one_layout_of_its_input_and_gate_and_up(nonlinear, per_element, compiled):
    torch._dynamo.reset()
    mlp = make("delayed", nonlinear=nonlinear).layer.mlp
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
