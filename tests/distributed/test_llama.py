"""A Hugging Face Llama in the engine, with fused producers and with our attention, trains as one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from support.models import Llama
from support.ranks import RankError

pytestmark = pytest.mark.distributed

NOISE = 0.0022
"""Largest loss difference in ten steps that summing gradients of micro-batches in fp32 instead of bf16 makes here."""
LEAF = {"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}}
ATTENTION = {"attention": {"backend": "fa3_fp8_emulated"}}


def run(
    stage: int, fp8: dict[str, Any], zero: dict[str, Any], num_steps: int, **sizes: int
) -> tuple[list[float], list[str], str]:
    """Losses, which modules are fused, and the name of the attention. Every other batch has a padded row."""
    torch.manual_seed(0)
    model = Llama(**sizes).model
    engine = training.start(model, training.ds_config(stage, fp8, zero_optimization=zero))
    losses = []
    for step in range(num_steps):
        tokens = training.micro_batches(step, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        tokens = tokens.to(engine.device)
        mask = torch.ones_like(tokens)
        mask[1, -5:] = 0 if step % 2 else 1
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    fused = [name for name, module in engine.module.named_modules() if type(module).__name__.startswith("Fp8Llama")]
    training.destroy(engine)
    return losses, fused, model.config._attn_implementation


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_an_mlp_inside_a_leaf_of_zero_3_has_the_bits_of_its_linears(ranks: Any) -> None:
    """Inside of a leaf it is one function; else its linears are called, for ZeRO-3's hooks."""
    fp8 = {"linear": {"recipe": "rowwise"}, "activations": {"fused": True}}
    by_linears, in_a_leaf = (ranks(2).run(run, 3, fp8, zero, 4)[0] for zero in ({}, LEAF))
    assert in_a_leaf == by_linears and len(in_a_leaf[1]) == 6


def test_fused_producers_train_as_linears_do_and_with_inputs_kept_in_fp8_too(ranks: Any) -> None:
    blocks = {}, {"fused": True}, {"fused": True, "nonlinear": "fp8"}
    (plain, none, _), (fused, some, _), (kept, *_) = (
        ranks(2).run(run, 2, {"linear": {"recipe": "delayed"}, "activations": block}, {}, 10)[0] for block in blocks
    )
    assert len(none) == 0 and len(some) == 6
    assert difference(plain, fused) <= 3 * NOISE
    assert 0 < difference(fused, kept) <= 0.02
    assert kept[-1] < 0.9 * kept[0]


def test_the_key_puts_our_attention_into_the_model(ranks: Any) -> None:
    (stock, _, name), (ours, _, own) = (ranks(2).run(run, 3, fp8, {}, 4)[0] for fp8 in ({}, ATTENTION))
    assert (name, own) == ("sdpa", "fp8_ds_fa3_fp8_emulated")
    for a, b in zip(stock, ours, strict=True):
        assert 0 < abs(a - b) < 0.02 * a


def start(backend: str) -> None:
    model = Llama().model if backend == "fa3" else training.TinyLM()
    training.start(model, training.ds_config(2, {"attention": {"backend": backend}}))


@pytest.mark.parametrize(("backend", "said"), [("fa3", "FlashAttention-3"), ("fa3_fp8_emulated", ".*TinyLM")])
def test_attention_that_cannot_be_is_refused_before_training(ranks: Any, backend: str, said: str) -> None:
    with pytest.raises(RankError, match=rf"UnsupportedError: fp8\.attention\.backend: {said}"):
        ranks(2).run(start, backend)
