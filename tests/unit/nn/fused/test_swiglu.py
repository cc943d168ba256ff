"""The SwiGLU MLP as one function: the bits of its linears called one by one, what it keeps, when it is taken."""

import copy
import itertools
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from support import many_scales
from support.linears import RECIPES, attach_payload, convert
from support.models import SwigluMlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import ActivationsConfig
from fp8_ds.nn.fused import mlp as mlp_module
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.recipes import Bf16Recipe
from fp8_ds.numerics.formats import E4M3
from fp8_ds.testing import assert_bitwise, sqnr_db

TOKENS, WIDTH, HIDDEN = 48, 64, 160
NAMES = ("gate_proj", "up_proj", "down_proj")
COVERING = list(zip(RECIPES, itertools.cycle(("fp8", "bf16")), strict=False))
"""A graph takes a second to make: each recipe once, each way to keep gate and up at least twice."""


def make(recipe="tensorwise", nonlinear="bf16", bias=False, updates=1):
    """(fused MLP, amax history with so many updates)"""
    torch.manual_seed(0)
    mlp = SwigluMlp(WIDTH, HIDDEN, bias).bfloat16()
    history = convert(mlp, recipe=recipe)
    fuse_producers(mlp, ActivationsConfig(fused=True, nonlinear=nonlinear))
    for _ in range(updates if history is not None else 0):
        history.update(torch.tensor([50.0, 0.1, 50.0, 0.1, 100.0, 0.1]))
    return mlp, history


def one_by_one(mlp):
    """The same MLP with a hook, so that its linears are called as modules."""
    mlp.gate_proj.register_forward_hook(lambda *_: None)
    return mlp


def inputs(seed=0, scale=1.0):
    x = many_scales("per_row", TOKENS, WIDTH, seed).clamp(-50, 50) * scale
    return x.bfloat16().view(3, TOKENS // 3, WIDTH)


def run(function, mlp, x=None, grad=None, x_trains=True):
    """Output and all gradients, None where there is none; the input is a computed one."""
    x = (inputs() if x is None else x).clone().requires_grad_(x_trains)
    output = function(x * 1)
    if output.requires_grad:
        output.backward(inputs(1, 1e-3) if grad is None else grad)
    found = {"output": output.detach(), "x": x.grad} | {name: p.grad for name, p in mlp.named_parameters()}
    mlp.zero_grad()
    return found


def assert_same(expected, got):
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert_bitwise(value, got[name])
            assert value.isfinite().all() and value.any(), name


def graphs_of(mlp):
    """Forward and backward graph of one training step."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def compiler(module, example_inputs):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    compiled = torch.compile(mlp, backend=backend, fullgraph=True)
    compiled(inputs().requires_grad_() * 1).backward(inputs(1, 1e-3))
    return graphs


@pytest.fixture
def taken(monkeypatch):
    """Grows by one for every forward that is one function."""
    calls = []
    stock = mlp_module.swiglu_mlp
    monkeypatch.setattr(mlp_module, "swiglu_mlp", lambda *args: calls.append(1) or stock(*args))
    return calls


# --- numbers ---


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_gradients_and_amaxes_are_those_of_the_linears_called_one_by_one(recipe, bias, taken):
    (one, history), (parts, parts_history) = make(recipe, bias=bias, updates=0), make(recipe, bias=bias, updates=0)
    one_by_one(parts)
    for step in range(1 if history is None else 3):
        batch = inputs(step), inputs(10 + step, 1e-3)
        assert_same(run(parts, parts, *batch), run(one, one, *batch))
        assert len(taken) == step + 1
        if history is not None:
            assert (history.amax_local > 0).all()
            assert_bitwise(parts_history.amax_local, history.amax_local)
            for each in (history, parts_history):
                each.update(each.amax_local.clone())


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_in_fp8_the_output_is_the_same_and_gradients_are_within_its_error(recipe):
    models = make(recipe)[0], make(recipe, "fp8")[0], one_by_one(make(recipe, "fp8")[0])
    exact, kept, parts = (run(mlp, mlp) for mlp in models)
    assert_bitwise(exact["output"], kept["output"])
    assert_bitwise(parts["x"], kept["x"])  # the product's columns alone are others
    assert_bitwise(parts["gate_proj.weight"], kept["gate_proj.weight"])
    assert 20 < sqnr_db(parts["down_proj.weight"], kept["down_proj.weight"]) < 40


def weights_of(mlp):
    return [(name, mlp.get_submodule(name).weight) for name in NAMES]


# --- what is kept ---


def of_tokens(tensors):
    """(dtype, shape) -> how many of them have a row or a column for each token."""
    return Counter((t.dtype, tuple(t.shape)) for t in tensors if TOKENS in t.shape)


def kept_by(mlp):
    """What autograd keeps of a training forward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mlp(inputs().requires_grad_() * 1)
    return of_tokens(kept)


def kept_by_graph(mlp):
    """What a compiled training forward returns beside its output: not all of it passes hooks."""
    (output,) = (node for node in graphs_of(mlp)[0].nodes if node.op == "output")
    values = (getattr(node, "meta", {}).get("val") for node in output.args[0])
    return of_tokens(value for value in values if isinstance(value, torch.Tensor))


def expected_kept(recipe, nonlinear):
    fp8, wide = torch.float8_e4m3fn, torch.bfloat16
    kept = Counter()
    kept[(wide, (TOKENS, WIDTH)) if recipe == "rowwise_with_gw_hp" else (fp8, (WIDTH, TOKENS))] = 1
    kept[wide if nonlinear == "bf16" else fp8, (TOKENS, HIDDEN)] = 2
    if nonlinear == "fp8":
        kept[torch.float32, (TOKENS, 2)] = 2
    return kept


@pytest.mark.parametrize("nonlinear", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_are_one_layout_of_the_input_and_gate_and_up(recipe, nonlinear):
    in_graphs = [kept_by_graph] if (recipe, nonlinear) in COVERING[:3] else []
    for kept in (kept_by, *in_graphs):
        assert_kept(kept(make(recipe, nonlinear)[0]), recipe, nonlinear)


def assert_kept(found, recipe, nonlinear):
    scales = {key for key in found if key[0] == torch.float32 and key[1] in [(TOKENS, 1), (TOKENS,)]}
    assert len(scales) == (recipe == "rowwise")
    for key in scales:
        del found[key]
    assert found == expected_kept(recipe, nonlinear)


@pytest.mark.parametrize(("recipe", "mode"), zip(RECIPES, [torch.no_grad, torch.inference_mode] * 3, strict=False))
def test_evaluation_computes_the_same_and_keeps_and_records_nothing(recipe, mode, taken):
    mlp, history = make(recipe, "fp8")
    expected = mlp(inputs()).detach()
    if history is not None:
        history.amax_local.zero_()
    with mode():
        assert_bitwise(mlp(inputs()), expected)
    assert len(taken) == 2 and (history is None or not history.amax_local.any())


# --- when it is taken ---


@pytest.mark.parametrize(
    ("compiled", "change"),
    [(False, change) for change in ("relu", "forward", "function", "transformers")]
    + [(True, "function"), (True, "transformers")]
    + [pytest.param(True, change, marks=pytest.mark.slow) for change in ("relu", "forward")],
)
def test_with_its_activation_replaced_it_is_the_stock_module(change, compiled, taken):
    class WithModule(SwigluMlp):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    torch._dynamo.reset()
    fused = WithModule(WIDTH, HIDDEN).bfloat16()
    fused.act_fn = nn.SiLU()
    convert(fused)
    stock = copy.deepcopy(fused)
    fuse_producers(fused, ActivationsConfig(fused=True))
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    expected = run(function, fused)
    for mlp in (fused, stock):
        if change == "forward":
            mlp.act_fn.forward = torch.relu
        else:
            del mlp.act_fn
            silu = pytest.importorskip("transformers.activations").ACT2FN["silu"]
            mlp.act_fn = {"relu": nn.ReLU(), "function": torch.relu, "transformers": silu}[change]
    num = len(taken)
    assert (fused.fp8_function((inputs(),), {}) is None) == (change != "transformers")
    assert_same(expected if change == "transformers" else run(stock, stock), run(function, fused))
    assert (len(taken) > num) == (change == "transformers")


def test_float32_and_autocast_take_the_stock_forward(taken):
    fused, stock = make()[0].float(), SwigluMlp(WIDTH, HIDDEN).bfloat16()
    stock.load_state_dict(fused.state_dict())
    convert(stock.float())
    x = inputs().float()
    assert_bitwise(fused(x), stock(x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for given in (x, x.bfloat16()):
                assert_bitwise(fused(given), stock(given))
    assert not taken


HOOKS = {
    "forward": lambda mlp: mlp.gate_proj.register_forward_hook(lambda *_: None),
    "forward pre": lambda mlp: mlp.up_proj.register_forward_pre_hook(lambda *_: None),
    "backward": lambda mlp: mlp.down_proj.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda mlp: mlp.down_proj.register_full_backward_pre_hook(lambda *_: None),
    "of all modules": lambda mlp: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_while_a_linear_has_a_hook_linears_are_called_one_by_one(kind, taken):
    mlp, _ = make()
    handle = HOOKS[kind](mlp)
    hooked = run(mlp, mlp)
    assert not taken
    handle.remove()
    assert_same(run(mlp, mlp), hooked)
    assert len(taken) == 1


@pytest.mark.parametrize("change", ["its own forward", "bf16", "another recipe", "another gradient format"])
def test_linears_that_are_not_alike_are_called_one_by_one(change, taken):
    mlp, _ = make()
    expected = run(mlp, mlp)
    taken.clear()
    if change == "its own forward":
        mlp.up_proj.forward = partial(type(mlp.up_proj).forward, mlp.up_proj)
    elif change == "bf16":
        del mlp.gate_proj.fp8_recipe
        mlp.gate_proj.__class__ = nn.Linear
    elif change == "another recipe":
        mlp.up_proj.fp8_recipe = make("rowwise")[0].up_proj.fp8_recipe
    else:
        mlp.up_proj.fp8_recipe.grad_format = E4M3
    for name, value in run(mlp, mlp).items():
        assert sqnr_db(expected[name], value) > 15
    assert not taken


@pytest.mark.parametrize(("recipe", "names"), [("delayed", NAMES), ("delayed", NAMES[:1]), ("rowwise", NAMES[1:])])
def test_layers_in_bf16_for_now_compute_as_its_linears_and_record_all_amaxes(recipe, names):
    (one, history), (parts, _) = make(recipe, updates=0), make(recipe, updates=0)
    for mlp in (one, one_by_one(parts)):
        for name in names:
            linear = mlp.get_submodule(name)
            linear.fp8_recipe = Bf16Recipe(linear.fp8_recipe)
    expected, got = run(parts, parts), run(one, one)
    for name, value in expected.items():
        assert sqnr_db(value, got[name]) > 25, name
    assert history is None or bool((history.amax_local > 0).all())


# --- graphs of torch.compile ---


@pytest.mark.parametrize(("recipe", "nonlinear"), COVERING)
def test_compiled_is_one_graph_with_the_bits_of_eager(recipe, nonlinear):
    torch._dynamo.reset()
    (eager, history), (mlp, compiled_history) = (make(recipe, nonlinear, bias=True) for _ in range(2))
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    assert_same(run(eager, eager), run(compiled, mlp))
    if history is not None:
        assert_bitwise(history.amax_local, compiled_history.amax_local)


def test_one_graph_serves_batches_of_other_lengths():
    torch._dynamo.reset()
    mlp, _ = make()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for num_tokens in (16, 40):
        x, grad = torch.randn(2, num_tokens, WIDTH).bfloat16(), torch.randn(2, num_tokens, WIDTH).bfloat16()
        assert_same(run(mlp, mlp, x, grad), run(compiled, mlp, x, grad))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- autograd ---


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_frozen_weights_leave_the_other_gradients_and_amaxes_as_they_are(recipe, taken):
    for x_trains, *trains in itertools.product([True, False], repeat=4):
        (one, history), (parts, parts_history) = make(recipe), make(recipe)
        one_by_one(parts)
        for mlp in (one, parts):
            for (_, weight), is_trained in zip(weights_of(mlp), trains, strict=True):
                weight.requires_grad_(is_trained)
        taken.clear()
        assert_same(run(parts, parts, x_trains=x_trains), run(one, one, x_trains=x_trains))
        assert len(taken) == 1
        if history is not None:
            assert_bitwise(parts_history.amax_local, history.amax_local)


@pytest.mark.parametrize(("recipe", "use_reentrant"), [("tensorwise", True), ("delayed", True), ("delayed", False)])
def test_checkpointing_gives_the_same_bits_and_amaxes(recipe, use_reentrant, taken):
    mlp, history = make(recipe)
    expected = run(mlp, mlp)
    recorded = None if history is None else history.amax_local.clone()
    if history is not None:
        history.amax_local.zero_()
    assert_same(expected, run(lambda x: checkpoint(mlp, x, use_reentrant=use_reentrant), mlp))
    assert len(taken) == 3
    if history is not None:
        assert_bitwise(recorded, history.amax_local)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp))])
def test_copies_compute_the_same_with_weights_of_their_own(duplicate, taken):
    mlp, _ = make()
    other = duplicate(mlp)
    assert_same(run(mlp, mlp), run(other, other))
    with torch.no_grad():
        other.up_proj.weight.zero_()
    assert not other(inputs()).any() and mlp(inputs()).any()
    assert len(taken) == 4


def test_backward_reads_bytes_gathered_after_the_forward():
    """As ZeRO-3 inside a leaf module: forward's bytes are gone then."""
    mlp, _ = make()
    expected = run(mlp, mlp)
    for linear in mlp.children():
        attach_payload(linear)
    x = inputs().requires_grad_()
    output = mlp(x * 1)
    for _, weight in weights_of(mlp):
        shard = weight._fp8.data.clone()
        weight._fp8.data.view(torch.uint8).fill_(0x7F)
        weight._fp8.data = shard
    output.backward(inputs(1, 1e-3))
    assert_same(expected, {"output": output.detach(), "x": x.grad} | {n: p.grad for n, p in mlp.named_parameters()})


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (2, 3, 5, WIDTH), (0, WIDTH)], ids=str)
def test_any_number_of_leading_dims(shape):
    (one, _), (parts, _) = make(), make()
    one_by_one(parts)
    x, grad = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    expected, got = run(parts, parts, x, grad), run(one, one, x, grad)
    assert got["output"].shape == shape
    one(x).mul_(2)  # it may be written in place
    for name, value in expected.items():
        assert_bitwise(value, got[name])
