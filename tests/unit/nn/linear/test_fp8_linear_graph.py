"""Fp8Linear inside checkpointing and torch.compile: the same bits, no graph break."""

import copy
from collections import OrderedDict

import pytest
import torch
from support.linears import RECIPES, attach_payload, convert, fp8_of, step_of
from support.models import SwigluMlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import assert_bitwise, sqnr_db


def make(recipe="tensorwise", with_payload=False, dtype=torch.float32, in_features=48, out_features=40):
    torch.manual_seed(0)
    linear = fp8_of(nn.Linear(in_features, out_features).to(dtype), recipe, InputCache())
    if with_payload:
        attach_payload(linear, "tensorwise" if recipe == "delayed" else recipe)
    return linear, getattr(linear.fp8_recipe, "history", None)


def run(function, linear, x):
    """One step with gradients that differ, see `step_of`."""
    grad_output = torch.linspace(-1, 2, x[..., 0].numel() * linear.out_features).view(*x.shape[:-1], -1)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
    return [one.clone() for one in step_of(linear, x, grad_output.to(dtype), function)]


def assert_all_bitwise(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "with_payload", "use_reentrant"),
    [("tensorwise", True, True), ("rowwise", True, False), ("delayed", True, False), ("delayed", False, True)],
)
def test_checkpointing_gives_the_same_bits(use_reentrant, recipe, with_payload):
    """Forward's gathered bytes, if any, are gone when the recomputation and the backward run."""
    linear, history = make(recipe, with_payload)
    x = torch.randn(6, 48)
    expected = run(linear, linear, x)
    recorded = None if history is None else history.amax_local.clone()
    if history is not None:
        history.amax_local.zero_()

    def checkpointed(x):
        output = checkpoint(linear, x, use_reentrant=use_reentrant)
        if with_payload:
            payload = linear.weight._fp8
            regathered = payload.data.clone()
            payload.data.view(torch.uint8).fill_(0x7F)
            payload.data = regathered
        return output

    assert_all_bitwise(run(checkpointed, linear, x), expected)
    if history is not None:
        assert_bitwise(history.amax_local, recorded)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.slow), "rowwise"])
def test_linears_of_several_widths_compile_one_by_one(recipe):
    """The compiler makes a size that it has seen change a symbol; torch 2.11 failed on it (ZeRO-3, H200), 2.13 not."""
    for widths in ((64, 64), (64, 32), (64, 128), (128, 64), (256, 64)):
        linear, _ = make(recipe, False, torch.float32, *widths)
        x = torch.randn(2, 3, widths[0])
        expected = run(linear, linear, x)
        assert_all_bitwise(run(torch.compile(linear, backend="aot_eager", fullgraph=True), linear, x), expected)


# Of symbols, "tensorwise" and "rowwise" have the test above.
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow), "blockwise"])
def test_linears_of_one_graph_compile_with_every_size_a_symbol(recipe):
    """`dynamic=True` makes symbols of floats too, which torch 2.13 cannot hand to a second autograd function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
    config = LinearConfig(recipe=recipe)
    apply_plan(model, make_plan(model, config), config, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for num_tokens in (5, 7):
        x = torch.randn(num_tokens, 32)
        gradients = []
        for run_model in (model, compiled):
            model.zero_grad()
            run_model(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert_all_bitwise(*gradients)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("recipe", "dtype", "with_payload", "autocast"),
    [*((recipe, torch.bfloat16, True, False) for recipe in RECIPES), ("tensorwise", torch.float32, False, True)],
)
def test_compiled_equals_eager_without_graph_breaks(with_payload, dtype, recipe, autocast):
    # fullgraph=True raises at the first graph break.
    linear, history = make(recipe, with_payload, dtype)
    x = torch.randn(2, 3, 48, dtype=dtype)
    if history is not None:
        history.update(torch.tensor([2.0, 4.0]))

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return linear(x)

    expected = run(forward, linear, x)
    recorded = None if history is None else history.amax_local.clone()
    if history is not None:
        history.amax_local.zero_()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert_all_bitwise(run(compiled, linear, x), expected)
    if history is not None:
        assert_bitwise(history.amax_local, recorded)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_follows_new_bytes_without_recompiling():
    """A step later the payload holds other bytes in another tensor under another scale."""
    linear, _ = make(with_payload=True)
    x = torch.randn(6, 48)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    before = run(compiled, linear, x)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    new_values = torch.randn(40, 48)
    for _ in range(2):
        payload = linear.weight._fp8
        payload.data, scale_inv = quantize_tensorwise(new_values, E4M3)
        payload.scale_inv.copy_(scale_inv)
        after = run(compiled, linear, x)
        assert_all_bitwise(after, run(linear, linear, x))
        assert not torch.equal(before[0], after[0])
        new_values = new_values * 3
        before = after
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_delayed_compiles_twice_at_most_over_many_steps():
    """Once before and once after the first update; the step counter is no guard."""
    linear, history = make("delayed")
    eager = copy.deepcopy(linear)
    eager_history = eager.fp8_recipe.history
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    for _ in range(5):
        x = torch.randn(6, 48)
        assert_all_bitwise(run(compiled, linear, x), run(eager, eager, x))
        history.update(history.amax_local)
        eager_history.update(eager_history.amax_local)
        assert_bitwise(history.scale, eager_history.scale)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_backward_is_traced_once(recipe, monkeypatch):
    """Dynamo traces it again, with copies of its gradients, where it asks for a tensor's layout by a method."""

    def again(backward):
        raise AssertionError(f"a second trace of {backward}")

    tracer = "torch._dynamo._trace_wrapped_higher_order_op"
    monkeypatch.setattr(f"{tracer}.autograd_function_backward_rewritten", again)
    net = nn.Sequential(nn.Linear(48, 64), SwigluMlp(64, 80)).bfloat16()
    history = convert(net, recipe=recipe)
    fuse_producers(net, ActivationsConfig(fused=True))
    if history is not None:
        history.update(torch.ones(history.num_slots))
    x, factors = torch.randn(6, 48).bfloat16().requires_grad_(), torch.randn(64, 6).bfloat16()
    found = []
    for run in (torch.compile(net, backend="aot_eager", fullgraph=True), net):
        # The gradient of the output is a transposed view in both.
        found.append(torch.autograd.grad((run(x).t() * factors).sum(), [x, *net.parameters()]))
    assert_all_bitwise(*found)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_refuses_arguments_by_their_names():
    a, b, scale = (
        torch.zeros(16, 32).to(torch.float8_e4m3fn),
        torch.zeros(16, 32).to(torch.float8_e4m3fn),
        torch.ones(3),
    )
    product = torch.compile(lambda: scaled_mm(a, b, scale, torch.ones(()), torch.bfloat16), backend="eager")
    with pytest.raises(RuntimeError, match="scale_inv_a"):
        product()


def converted(recipe, fused):
    torch.manual_seed(0)
    parts = {"up": nn.Linear(48, 64), "norm": nn.RMSNorm(64, eps=1e-6), "mlp": SwigluMlp(64, 80, bias=True)}
    net, config = nn.Sequential(OrderedDict(parts)).bfloat16(), LinearConfig(recipe=recipe)
    plan = make_plan(net, config)
    apply_plan(net, plan, config, "cpu")
    if fused:
        fuse_producers(net, ActivationsConfig(fused=True))
    return net, plan


@pytest.mark.parametrize(("recipe", "fused"), [("tensorwise", True), ("delayed", False), ("blockwise", False)])
def test_torch_fx_calls_layers_by_name_and_gives_the_same(fused, recipe):
    net, plan = converted(recipe, fused)
    graph = torch.fx.symbolic_trace(net)
    assert {row.fqn for row in plan.layers} <= {node.target for node in graph.graph.nodes if node.op == "call_module"}
    results = []
    for module in (net, graph):
        net.zero_grad()
        output = module(torch.linspace(-2, 2, 6 * 48).view(6, 48).bfloat16())
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in net.parameters())])
    for one, other in zip(*results, strict=True):
        if fused:  # the graph has the stock norm and MLP, whose bf16 sums have another order
            assert float(sqnr_db(one.float(), other.float())) > 30
        else:
            assert_bitwise(one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_torch_jit_traces_it_for_training_where_no_two_read_one_tensor(fused):
    net, _ = converted("delayed", fused)
    x = torch.linspace(-2, 2, 6 * 48).view(6, 48).bfloat16()
    with pytest.raises(RuntimeError, match="expected no tensor that two FP8 layers read"):
        torch.jit.trace(net, x)
    net.mlp = nn.Identity()
    graph = torch.jit.trace(net, x)  # and compares with a trace without gradients
    output = graph(2 * x)
    assert float(sqnr_db(net(2 * x).float(), output.float())) > 30
    output.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
