"""SwiGLU MLPs: which are recognised, and that a fused one is the module it was."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import many_scales
from support.producers import assert_within_steps
from torch import nn
from torch.nn.functional import silu

from fp8_ds.config import LinearConfig
from fp8_ds.nn.fused.mlp import FusedSwiglu, SwigluNames
from fp8_ds.nn.fused.module import Producer
from fp8_ds.nn.fused.search import find_swiglu
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipe import InputCache
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.testing import assert_bitwise

WIDTH, HIDDEN = 64, 160
NAMES = SwigluNames("gate_proj", "up_proj", "down_proj", ("act_fn",))
WITH_FUNCTION = replace(NAMES, activation=())
NOT_SILU = "its activation is not known to be SiLU"
FORM = "its forward is not seen to be down(silu(gate(x)) * up(x))"


class Mlp(nn.Module):
    """The form of transformers' LlamaMLP."""

    def __init__(self, activation=None):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # noqa: RET504 (as there)


class StepByStep(Mlp):
    def forward(self, hidden):
        """Docstrings are no statements."""
        gate = self.act_fn(self.gate_proj(hidden))
        up = self.up_proj(hidden)
        return self.down_proj(up * gate)


class Functional(Mlp):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Plus(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Scaled(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x * 2))


class Dropping(Mlp):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        hidden = F.dropout(hidden, 0.1)
        return self.down_proj(hidden)


class Branching(Mlp):
    def forward(self, x):
        if x.numel() == 0:
            return x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Powers(Mlp):
    """Written out it would be a thousand million factors."""

    def forward(self, x):
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        x = x * x * x * x * x * x * x * x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SameTwice(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


class Gelu(Mlp):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def doubled(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        return 2 * forward(self, x)

    return wrapped


class Decorated(Mlp):
    forward = doubled(Mlp.forward)


class DroppingSilu(nn.Module):
    def forward(self, x):
        return F.dropout(silu(x), 0.5, self.training)


class SiluWithBeta(nn.Module):
    """Swish with a beta, 1 as yet."""

    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Nested(Mlp):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.Module()
        self.act_fn.inner = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn.inner(self.gate_proj(x)) * self.up_proj(x))


def silu_with_its_own_forward():
    activation = nn.SiLU()
    activation.forward = lambda x: 2 * silu(x)
    return activation


def hooked_silu():
    activation = nn.SiLU()
    activation.register_forward_hook(lambda module, args, output: 2 * output)
    return activation


def replaced():
    module = Mlp()
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("mlp", "expected"),
    [
        (Mlp(), NAMES),
        (StepByStep(), NAMES),
        (Nested(), replace(NAMES, activation=("act_fn", "inner"))),
        (Mlp(F.silu), NAMES),
        (Functional(), WITH_FUNCTION),
        (Mlp(nn.GELU()), NOT_SILU),
        (Mlp(nn.Linear(4, 4)), NOT_SILU),
        (Mlp(DroppingSilu().eval()), NOT_SILU),
        (Mlp(SiluWithBeta()), NOT_SILU),
        (Mlp(type("Subclass", (nn.SiLU,), {})()), NOT_SILU),
        (Mlp(silu_with_its_own_forward()), NOT_SILU),
        (Mlp(hooked_silu()), NOT_SILU),
        (Gelu(), NOT_SILU),
        (Decorated(), "its forward is decorated"),
        (SameTwice(), FORM),
        (Plus(), FORM),
        (Scaled(), FORM),
        (Dropping(), FORM),
        (Branching(), FORM),
        (Powers(), FORM),
        (replaced(), "its forward was replaced"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else None,
)
def test_an_mlp_is_known_by_its_source(mlp, expected):
    assert find_swiglu(mlp) == expected


def make(nonlinear="bf16", fused=True):
    torch.manual_seed(0)
    mlp, shared = Mlp().bfloat16(), InputCache()
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        Fp8Linear.from_linear(linear, TensorwiseRecipe(LinearConfig(), shared))
    if fused:
        FusedSwiglu.fuse(mlp, find_swiglu(mlp), Producer((mlp.down_proj,), nonlinear))
    return mlp


def inputs(seed=0):
    return many_scales("per_row", 48, WIDTH, seed).clamp(-50, 50).bfloat16().view(3, 16, WIDTH)


def run(mlp, x, grad):
    return run_of(mlp, mlp, x, grad)


def run_of(function, mlp, x, grad):
    """Of a function that computes with the Parameters of `mlp`."""
    x = x.clone().requires_grad_()
    output = function(x * 1)
    output.backward(grad)
    grads = [x.grad, *(p.grad for p in mlp.parameters())]
    mlp.zero_grad()
    return [output.detach(), *grads]


def test_a_hook_on_the_last_linear_sees_true_values():
    mlp, seen = make(), []
    mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = inputs()
    mlp(x)
    expected = silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    assert_within_steps(expected.detach(), seen[0], share=2e-3, steps=2)


def test_float32_and_autocast_take_the_stock_forward():
    fused, stock = make().float(), make(fused=False).float()
    x = inputs().float()
    assert_bitwise(fused(x), stock(x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert_bitwise(fused(x), stock(x))
            assert_bitwise(fused(x.bfloat16()), stock(x.bfloat16()))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_hook_on_all_modules_sees_those_inside(backend):
    torch._dynamo.reset()
    fused, calls = make(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        if backend is not None:
            fused.compile(backend=backend)
        fused(inputs())
    finally:
        handle.remove()
    assert {fused.gate_proj, fused.up_proj, fused.act_fn, fused.down_proj} <= set(calls)


def relu(mlp):
    mlp.act_fn = nn.ReLU()


def own_forward(mlp):
    mlp.act_fn.forward = torch.relu


def function(mlp):
    del mlp.act_fn
    mlp.act_fn = torch.relu


@pytest.mark.parametrize(
    ("compiled", "change"),
    [
        (False, relu),
        (False, own_forward),
        (False, function),
        (True, own_forward),
    ],
)
def test_with_its_activation_replaced_it_is_the_stock_module(change, compiled):
    torch._dynamo.reset()
    fused, stock = make(), make(fused=False)
    run_fused = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    assert_bitwise(fused(inputs()), run_fused(inputs()))  # a graph is traced anew
    for mlp in (fused, stock):
        change(mlp)
    assert fused.fp8_function((inputs(),), {}) is None
    x, grad = inputs(), inputs(1)
    for a, b in zip(run(stock, x, grad), run_of(run_fused, fused, x, grad), strict=True):
        assert_bitwise(a, b)


def test_with_transformers_silu_it_is_fused_still_in_a_graph_too():
    torch._dynamo.reset()
    mlp, other = make(), make()
    other.act_fn = pytest.importorskip("transformers.activations").ACT2FN["silu"]
    assert type(other.act_fn) is not nn.SiLU and other.fp8_function((inputs(),), {}) is not None
    expected = run(mlp, inputs(), inputs(1))
    for function in (other, torch.compile(other, backend="aot_eager", fullgraph=True)):
        for a, b in zip(expected, run_of(function, other, inputs(), inputs(1)), strict=True):
            assert_bitwise(a, b)
