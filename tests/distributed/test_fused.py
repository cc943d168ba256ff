"""A Hugging Face Llama with fused producers trains as one without, under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from support.models import Llama

pytestmark = pytest.mark.distributed

NUM_STEPS = 10
LEAF = {"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}}


def run(
    stage: int,
    recipe: str,
    activations: dict[str, Any],
    zero: dict[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
    **overrides: Any,
) -> dict[str, Any]:
    """Losses, and which modules are fused."""
    import deepspeed

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    config = training.ds_config(stage, {"linear": {"recipe": recipe}, "activations": activations}, **overrides)
    config["zero_optimization"].update(zero or {})
    model = Llama()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses = training.train(engine, num_steps)
    fused = [name for name, module in engine.module.named_modules() if type(module).__name__.startswith("Fp8Llama")]
    training.destroy(engine)
    return {"losses": losses, "fused": fused}


@pytest.fixture(scope="module")
def noise(ranks: Any) -> float:
    """Largest loss difference that summing gradients of micro-batches in fp32 instead of bf16 makes."""
    plain, fp32 = (
        ranks(2).run(run, 2, "tensorwise", {}, gradient_accumulation_steps=2, data_types=data_types)[0]["losses"]
        for data_types in ({}, {"grad_accum_dtype": "fp32"})
    )
    return difference(plain, fp32)


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def check(results: list[dict[str, Any]], fused: bool) -> list[float]:
    """The losses, equal on all ranks."""
    losses: list[float] = results[0]["losses"]
    for result in results:
        assert result["losses"] == losses and len(result["fused"]) == 6 * fused
    return losses


def test_fused_losses_are_the_unfused_ones_within_bf16s_noise(ranks: Any, noise: float) -> None:
    plain = check(ranks(2).run(run, 2, "delayed", {}), fused=False)
    fused = check(ranks(2).run(run, 2, "delayed", {"fused": True}), fused=True)
    assert noise > 0
    assert difference(plain, fused) <= 3 * noise, (difference(plain, fused), noise)
    assert plain[-1] < 0.9 * plain[0]


def test_an_mlp_inside_a_leaf_of_zero_3_has_the_bits_of_its_linears(ranks: Any) -> None:
    """Inside of a leaf it is one function; else its linears are called, for ZeRO-3's hooks."""
    by_linears = check(ranks(2).run(run, 3, "rowwise", {"fused": True}, num_steps=4), fused=True)
    assert check(ranks(2).run(run, 3, "rowwise", {"fused": True}, LEAF, num_steps=4), fused=True) == by_linears


def test_inputs_kept_in_fp8_train_as_well(ranks: Any) -> None:
    plain = check(ranks(2).run(run, 3, "tensorwise", {}), fused=False)
    kept = check(ranks(2).run(run, 3, "tensorwise", {"fused": True, "nonlinear": "fp8"}), fused=True)
    assert 0 < difference(plain, kept) <= 0.02
    assert kept[-1] < 0.9 * kept[0]
