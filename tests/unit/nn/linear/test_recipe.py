"""One quantisation for all layers that read the same tensor, and how many torch calls a linear makes."""

import copy
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import OF_RECIPE, Fp8Payload
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.nn.plan.convert import apply_plan, revert
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise

QUANTIZE = "fp8_ds.quantize_and_transpose_tensorwise"


MAX_DISPATCHES = 20


class Calls(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def layers(num, shared, features=32):
    torch.manual_seed(0)
    made = [nn.Linear(features, features, bias=False).bfloat16() for _ in range(num)]
    return [Fp8Linear.from_linear(layer, TensorwiseRecipe(LinearConfig(), shared)) for layer in made]


def computed(*shape):
    """A tensor that autograd has computed, as the inputs of a model's linears are."""
    return torch.randn(shape).bfloat16().requires_grad_() * 1


class Alias(torch.autograd.Function):
    """What a hook of ZeRO-3 does with a module's input."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


def step(linears, x):
    """(outputs, gradients) of linears that read the same tensor."""
    x = x.clone().requires_grad_()
    inner = x * 1  # as in a model: no leaf
    outputs = [linear(inner) for linear in linears]
    torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
    grads = [linear.weight.grad.clone() for linear in linears] + [x.grad]
    for linear in linears:
        linear.weight.grad = None
    return [*outputs, *grads]


def test_three_layers_quantise_their_common_input_once_and_compute_the_same_bits():
    x = torch.randn(16, 32).bfloat16()
    together, alone = layers(3, InputCache()), layers(3, None)
    with Calls() as calls:
        got = step(together, x)
    assert calls.names[QUANTIZE] == 1 + 3  # x, and each grad_output
    with Calls() as calls:
        expected = step(alone, x)
    assert calls.names[QUANTIZE] == 3 + 3
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b)


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False).bfloat16() for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


class Normed(nn.Module):
    """Its projections are given what a module computes, as a decoder layer's are: their history has one leader."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32).bfloat16()
        self.projections = Projections()

    def forward(self, x):
        return self.projections(self.norm(x))


def test_in_a_graph_delayed_layers_quantise_their_common_input_once_and_record_it_all():
    torch.manual_seed(0)
    results, counts = [], Counter()

    def count(graph, example_inputs):
        counts.update(
            str(node.target) for node in graph.graph.nodes if "quantize_and_transpose_measured" in str(node.target)
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    model, config = Normed(), LinearConfig(recipe="delayed")
    for compiled in (False, True):
        here = copy.deepcopy(model)
        history = apply_plan(here, make_plan(here, config), config, "cpu")
        history.update(torch.full_like(history.amax_local, 3.0))
        x = torch.linspace(-1, 4, 16 * 32).view(16, 32).bfloat16().requires_grad_()
        run = torch.compile(here, backend=backend, fullgraph=True) if compiled else here
        output = run(x)
        output.float().square().sum().backward()
        results.append((output, x.grad, *(p.grad for p in here.parameters()), history.amax_local))
    assert counts.total() == 1
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


def test_in_a_graph_no_layer_takes_the_scale_of_one_that_is_in_bf16_again():
    """Nobody records an amax of that one: its scale stays 1."""
    torch._dynamo.reset()
    outputs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, config = Normed(), LinearConfig(recipe="delayed")
        torch.nn.init.constant_(model.norm.weight, 1e-3)  # 1 is far from a good scale
        plan = make_plan(model, config)
        history = apply_plan(model, plan, config, "cpu")
        revert(model, plan, [plan.layers[0].fqn], "in no parameter group")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            output = run(torch.linspace(-1, 4, 16 * 32).view(16, 32).bfloat16().requires_grad_())
            history.update(history.amax_local.clone())
        outputs.append(output)
    assert history.scale[0] == 1
    assert_bitwise(*outputs)


def test_layers_keep_one_layout_of_their_common_input_for_backward():
    linears = layers(3, InputCache())
    x = computed(16, 32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        [linear(x) for linear in linears]
    quantized = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 3 and {t.data_ptr() for t in quantized} == {quantized[0].data_ptr()}
    assert quantized[0].shape == (32, 16)


def test_a_tensor_written_in_place_is_quantised_again():
    first, second = layers(2, InputCache())
    x = computed(16, 32)
    first(x)
    x.mul_(-3)
    assert_bitwise(second(x), layers(2, None)[1](x))


def test_an_alias_of_the_same_elements_is_the_same_tensor():
    """ZeRO-3's hooks give each module `detach` of what it is called with."""
    first, second = layers(2, InputCache())
    x = computed(2, 8, 32)
    with Calls() as calls:
        first(Alias.apply(x)), second(Alias.apply(x)), second(x.view_as(x))
    assert calls.names[QUANTIZE] == 1


def test_other_elements_of_the_same_memory_are_quantised_again():
    first, second = layers(2, InputCache())
    plain = layers(2, None)[1]
    x = computed(32, 32)
    for other in (x[16:], x.t(), x[:16].view(2, 8, 32)):
        first(x[:16])
        assert_bitwise(second(other), plain(other))
    for other in (x[16:], x.t()):
        first(x)
        assert_bitwise(second(other), plain(other))


def test_a_write_through_an_alias_is_seen():
    first, second = layers(2, InputCache())
    x = computed(16, 32)
    first(x)
    x.detach().mul_(-3)
    assert_bitwise(second(x), layers(2, None)[1](x))


def test_memory_that_is_used_again_is_another_tensor():
    """The allocator may give a new tensor the address of one that is gone."""
    shared = InputCache()
    first, second = layers(2, shared)
    plain = layers(2, None)[1]
    x = computed(16, 32)
    first(x)
    address = x.data_ptr()
    del x
    for _ in range(50):
        y = computed(16, 32)
        if y.data_ptr() == address:
            break
    assert_bitwise(second(y), plain(y))


def test_a_layer_that_trains_after_a_frozen_one_gets_its_layout():
    frozen, trained = layers(2, InputCache())
    frozen.weight.requires_grad_(False)
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    (frozen(x) + trained(x)).float().sum().backward()
    plain = layers(2, None)
    y = x.detach().clone().requires_grad_()
    (plain[0](y) + plain[1](y)).float().sum().backward()
    assert_bitwise(trained.weight.grad, plain[1].weight.grad)


def test_fp8_tensors_are_freed_with_the_tensor_they_were_made_of():
    shared = InputCache()
    (linear,) = layers(1, shared)
    x = computed(16, 32)
    linear(x)
    rows = weakref.ref(shared._quantized.rows)
    gc.disable()
    try:
        del x
        assert rows() is None and shared._quantized is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_share_and_compute_the_same_bits(use_reentrant):
    x = torch.randn(16, 32).bfloat16()
    together, alone = layers(2, InputCache()), layers(2, None)

    def block(linears, inner):
        return linears[0](inner * 1) + linears[1](inner)

    results = []
    for linears, wrapped in ((together, True), (alone, False)):
        inner = x.clone().requires_grad_()
        output = checkpoint(block, linears, inner, use_reentrant=use_reentrant) if wrapped else block(linears, inner)
        output.float().square().sum().backward()
        results.append([output, inner.grad, *(linear.weight.grad for linear in linears)])
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


def test_parameters_and_buffers_are_quantised_each_time():
    """ZeRO's step writes the buffer that a parameter views, a collective a batch: no version counter moves."""
    first, second = layers(2, InputCache())
    plain = layers(2, None)[1]
    flat = torch.randn(16 * 32).bfloat16()
    latents = nn.Parameter(torch.empty(16, 32).bfloat16())
    latents.data = flat.view(16, 32)
    for read in (lambda: latents, lambda: latents.expand(2, 16, 32), lambda: latents.detach()):
        first(read())
        flat.mul_(-3)
        assert_bitwise(second(read()), plain(read()))


def test_inference_tensors_have_no_version_and_are_quantised_each_time():
    first, second = layers(2, InputCache())
    with torch.inference_mode():
        x = torch.randn(16, 32).bfloat16()
        expected = second(x).clone()
        first(x)
        x.mul_(2)
        assert not torch.equal(second(x), expected)


class Probing(nn.Module):
    """As for a look at q: nothing of it is trained."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q, self.k = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x):
        h = self.norm(x)
        with torch.inference_mode():
            self.q(h)
        return self.k(h)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])  # others keep nothing of it for backward anyway
def test_fp8_tensors_made_in_inference_mode_are_kept_for_no_backward(recipe):
    torch.manual_seed(0)
    model, config = Probing().bfloat16(), LinearConfig(recipe=recipe)
    apply_plan(model, make_plan(model, config), config, "cpu")
    expected = copy.deepcopy(model)
    x = torch.randn(16, 32).bfloat16()
    output = model(x.clone().requires_grad_())
    output.sum().backward()
    other = expected.k(expected.norm(x.clone().requires_grad_()))
    other.sum().backward()
    assert_bitwise(output, other)
    assert_bitwise(model.k.weight.grad, expected.k.weight.grad)


def test_copies_and_pickles_of_a_model_start_with_nothing_remembered():
    linears = nn.ModuleList(layers(2, InputCache()))
    x = torch.randn(16, 32).bfloat16()
    expected = [linear(x) for linear in linears]
    for other in (copy.deepcopy(linears), pickle.loads(pickle.dumps(linears))):
        assert other[0].fp8_recipe.input_cache is other[1].fp8_recipe.input_cache
        assert other[0].fp8_recipe.input_cache is not linears[0].fp8_recipe.input_cache
        for linear, output in zip(other, expected, strict=True):
            assert_bitwise(linear(x), output)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", OF_RECIPE)
def test_a_linear_makes_at_most_twenty_torch_calls(recipe, bias):
    model, config = nn.Sequential(nn.Linear(64, 64, bias=bias)).bfloat16(), LinearConfig(recipe=recipe)
    history = apply_plan(model, make_plan(model, config), config, "cpu")
    if history is not None:
        history.update(torch.ones_like(history.amax_local))
    granularity, weight = OF_RECIPE[recipe], model[0].weight
    scale, scale_inv = granularity.scales(granularity.amax(weight.detach().reshape(-1), weight.shape))
    payload = Fp8Payload("weight", scale, scale_inv, torch.bfloat16)
    payload.data = payload.quantize(weight.detach())
    weight._fp8 = payload
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    grad_output = torch.randn(2, 16, 64).bfloat16()
    with Calls() as calls:
        model(x).backward(grad_output)
    assert x.grad is not None and weight.grad is not None
    assert calls.names.total() <= MAX_DISPATCHES, calls.names
