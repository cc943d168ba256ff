"""One quantisation for all layers that read the same tensor, and how many torch calls a linear makes."""

import copy
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.linears import attach_payload, convert, fp8_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import OF_RECIPE
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.nn.plan.convert import apply_plan, revert
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise, sqnr_db

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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
@pytest.mark.parametrize("around", ["plain", "checkpoint", "checkpoint, reentrant"])
def test_layers_that_share_their_input_compute_the_same_bits(recipe, around):
    torch.manual_seed(0)
    linears = [nn.Linear(144, 32, bias=False).bfloat16() for _ in range(3)]
    linears[0].weight.requires_grad_(False)  # its input has rows only: the next layer completes them
    x = torch.randn(40, 144).bfloat16()
    results = []
    for shared in (InputCache(), None):
        modules = [fp8_of(linear, recipe, shared) for linear in linears]

        def block(inner, modules=modules):
            inner = inner * 1  # as in a model: no leaf
            return torch.stack([module(inner) for module in modules])

        given = x.clone().requires_grad_()
        is_plain = around == "plain" or shared is None
        outputs = block(given) if is_plain else checkpoint(block, given, use_reentrant="reentrant" in around)
        outputs.float().square().sum().backward()
        results.append([outputs, given.grad, *(module.weight.grad for module in modules[1:])])
    for a, b in zip(*results, strict=True):
        if recipe == "blockwise":  # columns from the codes of the rows, not from x
            assert sqnr_db(b.detach(), a.detach()) > 25
        else:
            assert_bitwise(a, b)


def test_layers_quantise_their_common_input_once_and_keep_one_layout_of_it():
    linears, x, kept = layers(3, InputCache()), computed(2, 8, 32), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with Calls() as calls, hooks:
        # ZeRO-3's hooks give each module `detach` of what it is called with.
        linears[0](x), linears[1](Alias.apply(x)), linears[2](x.view_as(x))
    assert calls.names[QUANTIZE] == 1
    quantized = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 3 and {t.data_ptr() for t in quantized} == {quantized[0].data_ptr()}
    assert quantized[0].shape == (32, 16)


class Normed(nn.Module):
    """Its projections are given what a module computes, as a decoder layer's are: their history has one leader."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x, probes=False):
        h = self.norm(x)
        if probes:  # as for a look at q: nothing of it is trained
            with torch.inference_mode():
                self.q(h)
            return self.k(h)
        return self.q(h) + self.k(h) + self.v(h)


def test_in_a_graph_delayed_layers_quantise_their_common_input_once_and_record_it_all():
    torch.manual_seed(0)
    results, counts = [], Counter()

    def count(graph, example_inputs):
        counts.update(
            str(node.target) for node in graph.graph.nodes if "quantize_and_transpose_measured" in str(node.target)
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    model = Normed().bfloat16()
    for compiled in (False, True):
        here = copy.deepcopy(model)
        history = convert(here, recipe="delayed")
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
        model, config = Normed().bfloat16(), LinearConfig(recipe="delayed")
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


OTHERS = {
    "written in place": lambda x: x.mul_(-3),
    "written through an alias": lambda x: (x.detach().mul_(-3), x)[1],
    "other rows": lambda x: x[16:],
    "transposed": lambda x: x.t(),
    "other rows of the first": lambda x: x[:16].view(2, 8, 32),
}


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("part", [slice(0, 32), slice(0, 16)], ids=["whole", "part"])
def test_other_values_in_the_same_memory_are_quantised_again(how, part):
    first, second = layers(2, InputCache())
    x = computed(32, 32)
    first(x[part])
    other = OTHERS[how](x)
    assert_bitwise(second(other), layers(2, None)[1](other))


def test_memory_that_is_used_again_is_another_tensor():
    """The allocator may give a new tensor the address of one that is gone."""
    first, second = layers(2, InputCache())
    x = computed(16, 32)
    first(x)
    address = x.data_ptr()
    del x
    for _ in range(50):
        y = computed(16, 32)
        if y.data_ptr() == address:
            break
    assert_bitwise(second(y), layers(2, None)[1](y))


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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])  # others keep nothing of it for backward anyway
def test_what_inference_mode_computes_is_kept_for_no_backward_and_quantised_each_time(recipe):
    torch.manual_seed(0)
    model = Normed().bfloat16()
    convert(model, recipe=recipe)
    expected = copy.deepcopy(model)
    x = torch.randn(16, 32).bfloat16()
    output = model(x.clone().requires_grad_(), probes=True)
    output.sum().backward()
    other = expected.k(expected.norm(x.clone().requires_grad_()))
    other.sum().backward()
    assert_bitwise(output, other)
    assert_bitwise(model.k.weight.grad, expected.k.weight.grad)
    with torch.inference_mode():  # tensors without a version
        x = torch.randn(16, 32).bfloat16()
        before = model.k(x).clone()
        model.q(x)
        assert not torch.equal(model.k(x.mul_(2)), before)


def test_copies_and_pickles_of_a_model_start_with_nothing_remembered():
    linears = nn.ModuleList(layers(2, InputCache()))
    x = torch.randn(16, 32).bfloat16()
    expected = [linear(x) for linear in linears]
    for other in (copy.deepcopy(linears), pickle.loads(pickle.dumps(linears))):
        assert other[0].fp8_recipe.input_cache is other[1].fp8_recipe.input_cache
        assert other[0].fp8_recipe.input_cache is not linears[0].fp8_recipe.input_cache
        for linear, output in zip(other, expected, strict=True):
            assert_bitwise(linear(x), output)


@pytest.mark.parametrize(("recipe", "bias"), zip(OF_RECIPE, [True, False, True, True, False], strict=False))
def test_a_linear_makes_at_most_twenty_torch_calls(recipe, bias):
    """docs/speed.md says so."""
    linear = fp8_of(nn.Linear(64, 64, bias=bias).bfloat16(), recipe)
    if recipe == "delayed":
        linear.fp8_recipe.history.update(torch.ones(2))
    attach_payload(linear, recipe)
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    grad_output = torch.randn(2, 16, 64).bfloat16()
    with Calls() as calls:
        linear(x).backward(grad_output)
    assert x.grad is not None and linear.weight.grad is not None
    assert calls.names.total() <= MAX_DISPATCHES, calls.names
