"""The attention of a Hugging Face model under the engine: by the key, in training, said at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from support.ranks import RankError, RankPool

from fp8_ds.errors import UnsupportedError

pytestmark = pytest.mark.distributed

FP8 = {"attention": {"backend": "fa3_fp8_emulated"}}


def llama(head_dim: int = 16) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 4 * head_dim, "intermediate_size": 6 * head_dim, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(fp8: dict[str, Any], stage: int, head_dim: int = 16) -> dict[str, Any]:
    """Losses and the attention of the model; padded rows and packed ones are in the batches."""
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama(head_dim)
    config = training.ds_config(stage, fp8)
    engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
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
    engine.destroy()
    return {"losses": losses, "implementation": model.config._attn_implementation}


def test_the_key_puts_our_attention_into_the_model(ranks: Callable[[int], RankPool]) -> None:
    stock, ours = (ranks(2).run(train, fp8, 3) for fp8 in ({}, FP8))
    assert [one["implementation"] for one in ours] == ["fp8_ds_fa3_fp8_emulated"] * 2
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
