"""A guard against layers that count as FP8 and multiply in bf16: FP8 GEMMs of a step against converted layers."""

from collections import Counter

import pytest
import torch
from support.models import SwigluMlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

WIDTH, HIDDEN = 64, 160
NUM_GEMMS = {"tensorwise": 3, "delayed": 3, "rowwise": 3, "rowwise_with_gw_hp": 2, "blockwise": 3}
"""In FP8, of a layer in a step."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = SwigluMlp(WIDTH, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o_proj(self.q_proj(h) * self.k_proj(h))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class Gemms(TorchDispatchMode):
    """Counts products, by whether they are in FP8."""

    def __init__(self):
        super().__init__()
        self.num = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = str(func).split(".")[:2]
        if namespace == "fp8_ds" and name.startswith("scaled_mm"):
            self.num["fp8"] += 1
        elif namespace == "aten" and name in ("mm", "addmm", "bmm"):
            self.num["hp"] += 1
        return func(*args, **(kwargs or {}))


def gemms_of_a_step(model):
    with Gemms() as gemms:
        loss = model(torch.arange(32).view(2, 16)).float().square().mean()
        forward = gemms.num.copy()
        loss.backward()
    return forward, gemms.num


def assert_the_plan_is_true(model, plan, num_gemms):
    num, num_left = plan.num_converted, len(plan.layers) - plan.num_converted
    forward, step = gemms_of_a_step(model)
    assert forward == {"fp8": num, "hp": num_left}
    assert step == {"fp8": num_gemms * num, "hp": 3 * num_left + (3 - num_gemms) * num}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", NUM_GEMMS)
def test_each_converted_layer_multiplies_in_fp8(recipe, fused):
    model, config = Model().bfloat16(), LinearConfig(recipe=recipe, backend="reference")
    plan = make_plan(model, config)
    history = apply_plan(model, plan, config, "cpu")
    if fused:
        fuse_producers(model, ActivationsConfig(fused=True))
    assert plan.num_converted == 12  # all but lm_head
    assert_the_plan_is_true(model, plan, NUM_GEMMS[recipe])
    if history is not None:  # by scales of the history, from the second step on
        history.update(history.amax_local.clone())
        assert_the_plan_is_true(model, plan, NUM_GEMMS[recipe])


def test_a_layer_with_a_forward_of_its_own_is_not_counted():
    model, config = Model().bfloat16(), LinearConfig(backend="reference")
    layer = model.blocks[1].q_proj
    stock = layer.forward
    layer.forward = lambda x: stock(x)  # goes on as nn.Linear's, whatever class the layer is given
    plan = make_plan(model, config)
    apply_plan(model, plan, config, "cpu")
    assert plan.num_converted == 11
    assert_the_plan_is_true(model, plan, NUM_GEMMS["tensorwise"])
