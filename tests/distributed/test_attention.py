"""The attention of a Hugging Face model under the engine: by the key, in training, said at start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from deepspeed.utils import logger
from support.ranks import RankError, RankPool

from fp8_ds.errors import UnsupportedError

pytestmark = pytest.mark.distributed

FP8 = {"attention": {"backend": "fa3_fp8_emulated"}}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def llama(head_dim: int = 16) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 4 * head_dim, "intermediate_size": 6 * head_dim, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(fp8: dict[str, Any], stage: int, head_dim: int = 16) -> dict[str, Any]:
    """Losses and the line about attention; padded rows and packed ones are in the batches."""
    import deepspeed

    import fp8_ds  # noqa: F401

    seen = Lines()
    logger.addHandler(seen)
    model = llama(head_dim)
    config = training.ds_config(stage, fp8)
    engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    logger.removeHandler(seen)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (4, 33), generator=generator).cumsum(1).to(engine.device) % 64
        mask = torch.ones_like(tokens)
        mask[1, -5:] = 0 if step % 2 else 1
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    lines = [line for line in seen.lines if "attention" in line]
    engine.destroy()
    return {"losses": losses, "lines": lines, "implementation": model.config._attn_implementation}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_key_puts_our_attention_into_the_model(ranks: Callable[[int], RankPool], stage: int) -> None:
    stock, ours = (ranks(2).run(train, fp8, stage) for fp8 in ({}, FP8))
    assert [one["implementation"] for one in ours] == ["fp8_ds_fa3_fp8_emulated"] * 2
    assert any("fp8: attention: fa3_fp8_emulated" in line for line in ours[0]["lines"])
    assert stock[0]["implementation"] == "sdpa"
    for a, b in zip(stock[0]["losses"], ours[0]["losses"], strict=True):
        assert 0 < abs(a - b) < 0.02 * a


def start(backend: str) -> None:
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama() if backend == "fa3" else training.TinyLM()
    config = training.ds_config(2, {"attention": {"backend": backend}})
    deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("fa3", "fp8.attention.backend: FlashAttention-3: expected a Hopper GPU"),
        ("fa3_fp8_emulated", 'got "fa3_fp8_emulated" and TinyLM'),
    ],
)
def test_what_cannot_be_is_refused_before_training(ranks: Callable[[int], RankPool], backend: str, said: str) -> None:
    with pytest.raises(RankError, match=said) as error:
        ranks(2).run(start, backend)
    assert UnsupportedError.__name__ in str(error.value)
