"""Experts on CUDA: computed in one launch, where there are kernels for it, the host waits for nothing.

The results are the loop's but for the order of sums. In the loop each product is that of one expert, and the host waits
once. Engines train with either.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import test_experts as small
import torch
import training
from support.waits import host_waits
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.moe import products as expert_products
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.ops.grouped import can_run
from fp8_ds.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")


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
def test_at_once_they_are_the_loop_but_for_the_order_of_sums_and_the_host_waits_for_nothing(
    recipe: str, num_experts: int
) -> None:
    """A float32 sum in another order rounds to another bf16 here and there, which may round to another FP8 number."""
    looping, history = many_experts(recipe, num_experts)
    with in_a_loop():
        expected = outputs(looping, history, num_experts=num_experts)
    experts, history = many_experts(recipe, num_experts)
    found = outputs(experts, history, num_experts=num_experts)
    for at_once, looped in zip(found, expected, strict=True):
        assert looped.any() and float(sqnr_db(looped.float(), at_once.float())) > 40
    if recipe == "delayed":
        return
    x = torch.randn(700, 256, device="cuda").bfloat16().requires_grad_()
    weights, index = torch.rand(700, num_experts, device="cuda").topk(2)
    grad = torch.randn(700, 256, device="cuda").bfloat16()
    with host_waits() as waits:
        experts(x, index, weights).backward(grad)
    assert waits == []


E4M11 = {"optimizer": {"states": "fp8", "master": "e4m11"}}


@pytest.mark.parametrize(
    ("stage", "fp8", "family"),
    [
        (1, {}, "Mixtral"),
        (2, small.DELAYED, "Mixtral"),
        (2, E4M11, "Qwen3Moe"),
        (3, {}, "Mixtral"),
        (3, E4M11, "Mixtral"),
    ],
)
def test_an_engine_trains_with_them(gpu_ranks: Any, stage: int, fp8: dict[str, Any], family: str) -> None:
    results = gpu_ranks(1).run(small.trained, stage, fp8, family)
    small.check_weights(results[0], results[1:])
    if "optimizer" not in fp8:
        training.assert_fp8_follows_masters(results[0]["last"], results[0]["masters"])
    again = gpu_ranks(1).run(small.trained, stage, fp8, family, checkpointing=True)[0]
    assert again["losses"] == pytest.approx(results[0]["losses"], abs=0.02)
