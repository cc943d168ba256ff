"""RMSNorms: which are recognised, and that a fused one is the module it was."""

import copy
import pickle

import pytest
import torch
from support import many_scales
from support.producers import assert_within_steps
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.nn.fused.module import Producer
from fp8_ds.nn.fused.norm import FusedRMSNorm, arithmetic_of, is_candidate
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.testing import assert_bitwise, sqnr_db

WIDTH = 192


class LlamaNorm(nn.Module):
    """The rule of transformers' LlamaRMSNorm."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(3)).bfloat16())
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class OnePlus(LlamaNorm):
    def forward(self, hidden_states):
        x = hidden_states.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight.float())).bfloat16()


class OtherEps(LlamaNorm):
    """An attribute that does not mean what it is called."""

    def forward(self, hidden_states):
        self = copy.copy(self)
        self.variance_epsilon *= 2
        return super().forward(hidden_states)


class Raising(LlamaNorm):
    def forward(self, hidden_states, gate):
        return gate


class Widening(LlamaNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).float()


def torch_norm(**keys):
    return nn.RMSNorm(WIDTH, dtype=torch.bfloat16, **keys)


def replaced():
    norm = LlamaNorm()
    norm.forward = lambda x: x
    return norm


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (LlamaNorm(eps=1e-5), (1e-5, "twice")),
        (LlamaNorm(width=7), (1e-6, "twice")),
        (torch_norm(eps=1e-5), (1e-5, "once")),
        (torch_norm(), (torch.finfo(torch.float32).eps, "once")),
        (OnePlus(), "other arithmetic"),
        (OtherEps(), "other arithmetic"),
        (nn.LayerNorm(WIDTH, bias=False), "other arithmetic"),
        (Raising(), "its forward raised TypeError"),
        (Widening(), "its forward is not that of an RMSNorm"),
        (nn.RMSNorm((2, 8)), "weight of shape (2, 8)"),
        (replaced(), "its forward was replaced"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else None,
)
def test_a_norm_is_known_by_what_it_computes(norm, expected):
    assert is_candidate(norm)
    before = copy.deepcopy(norm.state_dict())
    assert arithmetic_of(norm) == expected
    assert_bitwise(norm.weight.detach(), before["weight"])


def make(norm=None, nonlinear="bf16", shared=None):
    """(fused norm, its reader, the stock norm)"""
    stock = LlamaNorm() if norm is None else norm
    torch.manual_seed(1)
    reader = Fp8Linear.from_linear(
        nn.Linear(WIDTH, 32, bias=False).bfloat16(), TensorwiseRecipe(LinearConfig(), shared or InputCache())
    )
    fused = copy.deepcopy(stock)
    FusedRMSNorm.fuse(fused, arithmetic_of(fused), Producer((reader,), nonlinear))
    return fused, reader, stock


def inputs(seed=0):
    return many_scales("per_row", 60, WIDTH, seed).bfloat16().view(3, 20, WIDTH)


def run(norm, x, grad):
    x = x.clone().requires_grad_()
    output = norm(x * 1)
    output.backward(grad)
    grads = [x.grad, norm.weight.grad]
    norm.weight.grad = None
    return output.detach(), *grads


@pytest.mark.parametrize("norm", [LlamaNorm(), torch_norm(eps=1e-6)], ids=["twice", "once"])
def test_values_and_gradients_are_those_of_the_stock_module(norm):
    """Up to the last bit of rstd, and the roundings of autograd's bf16 in between for the weight's gradient."""
    with torch.no_grad():
        norm.weight.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)))
    fused, _, stock = make(norm)
    x, grad = inputs(), inputs(1)
    expected, got = run(stock, x, grad), run(fused, x, grad)
    assert_within_steps(expected[0], got[0], share=2e-3, steps=2)
    assert got[0].shape == x.shape and not got[0].requires_grad
    assert sqnr_db(expected[1], got[1]) > 45  # measured 52: bf16's rounding, once here and often there
    assert sqnr_db(expected[2], got[2]) > 30
    true = x.double().clone().requires_grad_()
    weight = stock.weight.detach().double().requires_grad_()
    F.rms_norm(true, (WIDTH,), weight, 1e-6).backward(grad.double())
    assert sqnr_db(true.grad, got[1]) > max(45, sqnr_db(true.grad, expected[1]) - 1)
    assert sqnr_db(weight.grad, got[2]) > max(45, sqnr_db(weight.grad, expected[2]) - 1)


@pytest.mark.parametrize(
    ("nonlinear", "norm"),
    [
        pytest.param("bf16", LlamaNorm(), id="bf16-twice"),
        pytest.param("fp8", torch_norm(eps=1e-6), id="fp8-once"),
    ],
)
def test_in_a_graph_it_computes_the_stock_values_and_keeps_its_input_as_asked(norm, nonlinear):
    fused, _, stock = make(norm, nonlinear)
    x, grad = inputs(), inputs(1)
    kept = []

    def compiled(module):
        torch._dynamo.reset()
        graph = torch.compile(lambda x: module(x + 1) + 0, backend="aot_eager_decomp_partition", fullgraph=True)
        inner = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = graph(inner)
        output.backward(grad)
        grads = inner.grad, module.weight.grad
        module.weight.grad = None
        return output.detach(), *grads

    expected = compiled(stock)
    kept.clear()
    got = compiled(fused)
    assert_bitwise(expected[0], got[0])
    wide = [t for t in kept if t.shape[-1:] == (WIDTH,) and t.dim() > 1]
    assert {t.dtype for t in wide} == ({torch.float8_e4m3fn} if nonlinear == "fp8" else {torch.bfloat16})
    assert sum(t.numel() for t in wide) == x.numel()
    for a, b in zip(expected[1:], got[1:], strict=True):
        if nonlinear == "bf16":
            assert_bitwise(a, b)
        else:
            assert 25 < sqnr_db(a, b) < 60
    if nonlinear == "fp8":  # the gradients of eager, which keeps the same
        for a, b in zip(run(fused, x + 1, grad)[1:], got[1:], strict=True):
            assert sqnr_db(a, b) > 40
    with torch.no_grad():
        kept.clear()
        graph = torch.compile(fused, backend="aot_eager", fullgraph=True)
        assert_bitwise(graph(x), stock(x))


@pytest.mark.parametrize(("nonlinear", "how"), [("bf16", "reentrant"), ("fp8", "checkpoint"), ("bf16", "copy")])
def test_checkpointed_and_copied_with_its_reader_it_gives_the_same_bits(how, nonlinear):
    fused, reader, _ = make(nonlinear=nonlinear)
    block, results = nn.Sequential(fused, reader), []
    others = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))] if how == "copy" else [block]
    for one in (block, *others):
        inner = inputs().requires_grad_()
        is_wrapped = how != "copy" and bool(results)
        output = checkpoint(one, inner, use_reentrant=how == "reentrant") if is_wrapped else one(inner)
        output.float().square().sum().backward()
        results.append([output, inner.grad, *(p.grad for p in one.parameters())])
        one.zero_grad()
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_bitwise(a, b)
    for other in others:
        assert other[0].fp8_producer.readers == (other[1],)


def test_what_is_written_in_place_is_what_readers_see():
    fused, reader, stock = make()
    x = inputs().requires_grad_()
    hp = fused(x)
    hp.mul_(-3)
    plain = copy.deepcopy(reader)
    plain.fp8_recipe.input_cache = None
    assert_bitwise(reader(hp), plain(hp.detach().clone()))
    hp.sum().backward()
    grad = x.grad.clone()
    y = x.detach().clone().requires_grad_()
    stock(y).mul_(-3).sum().backward()
    assert sqnr_db(y.grad, grad) > 45


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_computes_the_same_and_keeps_nothing(mode):
    fused, reader, _ = make()
    x = inputs()
    expected = fused(x), reader(fused(x))
    with mode():
        hp = fused(x)
        got = hp, reader(hp)
    assert got[0].grad_fn is None
    for a, b in zip(expected, got, strict=True):
        assert_bitwise(a.detach(), b)


@pytest.mark.parametrize(
    ("x", "weight_dtype"),
    [(inputs().float(), torch.bfloat16), (inputs().float(), torch.float32), (inputs(), torch.float32)],
    ids=["fp32 input", "fp32", "fp32 weight"],
)
def test_other_dtypes_take_the_stock_forward(x, weight_dtype):
    fused, _, stock = make()
    expected, got = stock.to(weight_dtype)(x), fused.to(weight_dtype)(x)
    assert got.dtype == torch.float32
    assert_bitwise(expected, got)


def test_rows_with_gaps_are_normed_as_others():
    fused, _, _ = make()
    wide = torch.randn(4, 10, 2 * WIDTH).bfloat16()
    x = wide[..., WIDTH:].requires_grad_()
    fused(x).float().sum().backward()
    y = x.detach().contiguous().requires_grad_()
    fused(y).float().sum().backward()
    assert_bitwise(x.grad.contiguous(), y.grad)
