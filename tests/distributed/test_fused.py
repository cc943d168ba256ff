"""A Hugging Face Llama with fused producers trains as one without, under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from support.models import Llama

pytestmark = pytest.mark.distributed

NUM_STEPS = 10
NOISE = 0.0022
"""Largest loss difference that summing gradients of micro-batches in fp32 instead of bf16 makes here."""
LEAF = {"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}}


def run(
    stage: int,
    recipe: str,
    activations: dict[str, Any],
    zero: dict[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Losses, and which modules are fused."""
    torch.manual_seed(0)
    config = training.ds_config(stage, {"linear": {"recipe": recipe}, "activations": activations})
    config["zero_optimization"].update(zero or {})
    engine = training.start(Llama(), config)
    losses = training.train(engine, num_steps)
    fused = [name for name, module in engine.module.named_modules() if type(module).__name__.startswith("Fp8Llama")]
    training.destroy(engine)
    return {"losses": losses, "fused": fused}


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def check(results: list[dict[str, Any]], fused: bool) -> list[float]:
    """The losses, equal on all ranks."""
    losses: list[float] = results[0]["losses"]
    for result in results:
        assert result["losses"] == losses and len(result["fused"]) == 6 * fused
    return losses


def test_an_mlp_inside_a_leaf_of_zero_3_has_the_bits_of_its_linears(ranks: Any) -> None:
    """Inside of a leaf it is one function; else its linears are called, for ZeRO-3's hooks."""
    by_linears = check(ranks(2).run(run, 3, "rowwise", {"fused": True}, num_steps=4), fused=True)
    assert check(ranks(2).run(run, 3, "rowwise", {"fused": True}, LEAF, num_steps=4), fused=True) == by_linears


def test_fused_producers_train_as_linears_do_and_with_inputs_kept_in_fp8_too(ranks: Any) -> None:
    plain = check(ranks(2).run(run, 2, "delayed", {}), fused=False)
    fused = check(ranks(2).run(run, 2, "delayed", {"fused": True}), fused=True)
    kept = check(ranks(2).run(run, 2, "delayed", {"fused": True, "nonlinear": "fp8"}), fused=True)
    assert difference(plain, fused) <= 3 * NOISE
    assert 0 < difference(fused, kept) <= 0.02
    assert kept[-1] < 0.9 * kept[0]
