"""Experts on CUDA: computed in one launch, where there are kernels for it, the host waits for nothing.

The results are the loop's but for the order of sums. In the loop each product is that of one expert, and the host waits
once. Engines train with either.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import test_experts as small
import torch
import training
from support.waits import host_waits
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.nn.moe import products as expert_products
from fp8_ds.nn.moe.products import Groups, grouped_linear
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.grouped import can_run
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")


def run(x: Tensor, weight: Tensor, groups: Groups, backend: Any, grad: Tensor) -> list[Tensor]:
    given, p = x.clone().requires_grad_(), nn.Parameter(weight.clone())
    recipe = TensorwiseRecipe(LinearConfig(backend=backend))
    output = grouped_linear(given, p, groups, recipe, is_dispatched=False)
    output.backward(grad)
    assert given.grad is not None and p.grad is not None
    return [output.detach(), given.grad, p.grad]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_out", "num_in"),
    [(1000, 8, 512, 256), (37, 5, 48, 80), (50, 6, 40, 72), (3, 8, 64, 64), (0, 4, 64, 64)],
)
def test_products_are_those_of_each_expert(num_tokens: int, num_experts: int, num_out: int, num_in: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    scores[:, 1] = -1  # nobody's
    index = scores.topk(2).indices
    groups = Groups.of(index, num_experts)
    x = torch.randn(num_tokens, num_in, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(num_experts, num_out, num_in, device="cuda", generator=generator).bfloat16()
    grad = groups.dispatch(torch.randn(num_tokens, num_out, device="cuda", generator=generator).bfloat16())
    found = run(x, weight, groups, "torch", grad)
    reference = run(x, weight, groups, "reference", grad)
    assert not found[2][1].any()
    if num_tokens == 0:
        assert not found[2].any() and found[0].shape == (0, num_out)
        return
    for one, other in zip(reference, found, strict=True):
        assert one.shape == other.shape
        assert float(sqnr_db(one.float(), other.float())) > 45  # of bf16's rounding, and the accumulator's of `output`
    x_fp8, x_inv = quantize_tensorwise(x, E4M3)
    w_fp8, w_inv = quantize_tensorwise(weight, E4M3)
    g_fp8, g_inv = quantize_tensorwise(grad, E5M2)
    rows_x = groups.dispatch(x_fp8)
    for expert, rows in groups.occupied():
        product = scaled_mm(rows_x[rows], w_fp8[expert], x_inv, w_inv, torch.bfloat16, use_fast_accum=True)
        assert_bitwise(found[0][rows], product)
        own = scaled_mm(g_fp8[rows].t(), rows_x[rows].t(), g_inv, x_inv, torch.bfloat16)
        assert_bitwise(found[2][expert], own)
        # Zeros behind the tokens add nothing.
        tokens = (index == expert).any(1).nonzero()[:, 0]
        assert len(tokens) <= rows.stop - rows.start < len(tokens) + 16
        exact = slice(rows.start, rows.start + len(tokens))
        assert_bitwise(rows_x[exact].float(), x_fp8.float()[tokens])


def module(seed: int = 0, num_experts: int = 8) -> Any:
    from transformers import MixtralConfig

    torch.manual_seed(seed)
    config = MixtralConfig(hidden_size=256, intermediate_size=448, num_local_experts=num_experts)
    config._experts_implementation = "eager"
    experts = mixtral.MixtralExperts(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.05)
    return experts.to("cuda", torch.bfloat16)


def outputs(experts: Any, history: Any = None, steps: int = 2, num_experts: int = 8) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(700, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
        weights, index = torch.rand(700, num_experts, device="cuda", generator=generator).topk(2)
        weights.requires_grad_()
        experts.zero_grad()
        output = experts(x, index, weights)
        output.backward(torch.randn(output.shape, device="cuda", generator=generator).bfloat16())
        if history is not None:
            history.update(history.amax_local.clone())
        found += [output.detach(), x.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    return found


def in_a_loop() -> Any:
    """Experts are computed one after another, as on GPUs without kernels for all at once."""
    return patch.object(expert_products.grouped, "can_run", lambda device: False)


def many_experts(recipe: str = "tensorwise", num_experts: int = 40) -> tuple[Any, Any]:
    """A module of so many, and its history."""
    model = nn.ModuleDict({"experts": module(num_experts=num_experts)})
    config = LinearConfig.model_validate({"recipe": recipe})
    return model["experts"], apply_plan(model, make_plan(model, config), config, "cuda")


@pytest.mark.skipif(not can_run(torch.device("cuda")), reason="needs compute capability 9.0")
@pytest.mark.parametrize("num_experts", [4, 40])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_at_once_they_are_the_loop_but_for_the_order_of_sums(recipe: str, num_experts: int) -> None:
    """A float32 sum in another order rounds to another bf16 here and there, which may round to another FP8 number."""
    found = []
    for way in (nullcontext, in_a_loop):
        experts, history = many_experts(recipe, num_experts)
        with way():
            found.append(outputs(experts, history, num_experts=num_experts))
    for at_once, looped in zip(*found, strict=True):
        assert looped.any() and float(sqnr_db(looped.float(), at_once.float())) > 40


@pytest.mark.skipif(not can_run(torch.device("cuda")), reason="needs compute capability 9.0")
@pytest.mark.parametrize("num_experts", [4, 40])
def test_at_once_the_host_waits_for_nothing(num_experts: int) -> None:
    experts, _ = many_experts(num_experts=num_experts)
    outputs(experts, num_experts=num_experts)  # kernels are compiled
    x = torch.randn(700, 256, device="cuda").bfloat16().requires_grad_()
    weights, index = torch.rand(700, num_experts, device="cuda").topk(2)
    grad = torch.randn(700, 256, device="cuda").bfloat16()
    with host_waits() as waits:
        experts(x, index, weights).backward(grad)
    assert waits.names == []


@pytest.mark.parametrize(
    ("stage", "fp8", "family"),
    [
        (1, {}, "mixtral"),
        (2, small.DELAYED, "mixtral"),
        (2, small.E4M11, "qwen3_moe"),
        (3, {}, "mixtral"),
        (3, small.E4M11, "mixtral"),
    ],
)
def test_an_engine_trains_with_them(gpu_ranks: Any, stage: int, fp8: dict[str, Any], family: str) -> None:
    results = gpu_ranks(1).run(small.trained, stage, fp8, family)
    small.check_weights(results[0], results[1:])
    if "optimizer" not in fp8:
        training.assert_fp8_follows_masters(results[0]["last"], results[0]["masters"])
    again = gpu_ranks(1).run(small.trained, stage, fp8, family, checkpointing=True)[0]
    assert again["losses"] == pytest.approx(results[0]["losses"], abs=0.02)
