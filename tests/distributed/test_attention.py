"""The attention of a Hugging Face model under the engine: by the key, in training, said at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from support.models import Llama
from support.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

FP8 = {"attention": {"backend": "fa3_fp8_emulated"}}


def llama() -> Any:
    torch.manual_seed(0)
    return Llama().model


def train(fp8: dict[str, Any]) -> tuple[list[float], str]:
    """Losses and the attention of the model; there are padded rows in every other batch."""
    model = llama()
    engine = training.start(model, training.ds_config(3, fp8))
    losses = []
    for step in range(4):
        tokens = training.micro_batches(step, 1)[0]
        mask = torch.ones_like(tokens)
        mask[1, -5:] = 0 if step % 2 else 1
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    training.destroy(engine)
    return losses, model.config._attn_implementation


def test_the_key_puts_our_attention_into_the_model(ranks: Callable[[int], RankPool]) -> None:
    (stock, name), (ours, own) = (ranks(2).run(train, fp8)[0] for fp8 in ({}, FP8))
    assert (name, own) == ("sdpa", "fp8_ds_fa3_fp8_emulated")
    for a, b in zip(stock, ours, strict=True):
        assert 0 < abs(a - b) < 0.02 * a


def start(backend: str) -> None:
    model = llama() if backend == "fa3" else training.TinyLM()
    training.start(model, training.ds_config(2, {"attention": {"backend": backend}}))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("fa3", r"UnsupportedError: fp8\.attention\.backend: FlashAttention-3"),
        ("fa3_fp8_emulated", r"UnsupportedError: fp8\.attention\.backend: .*TinyLM"),
    ],
)
def test_what_cannot_be_is_refused_before_training(ranks: Callable[[int], RankPool], backend: str, said: str) -> None:
    with pytest.raises(RankError, match=said):
        ranks(2).run(start, backend)
