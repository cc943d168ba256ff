"""SwiGLU MLPs: which are recognised. That a fused one is the module it was: test_swiglu.py."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu

from fp8_ds.nn.fused.mlp import SwigluNames
from fp8_ds.nn.fused.search import find_swiglu

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
