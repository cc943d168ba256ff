"""Liger's loss as an estimate counts it: chunks by liger-kernel's rule, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.errors import UnsupportedError
from fp8_ds.liger_stand_in import LossOfLiger, chunk_size
from fp8_ds.rehearsal import rehearse

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "chunk_mem_const", "chunk"),
    [
        (16384, 4096, 32000, 1, 2048),  # the example in Liger's source
        (8192, 4096, 32000, 1, 1024),
        (8192, 4096, 128256, 1, 256),
        (8192, 4096, 128256, 4, 1024),
        (8192, 4096, 128256, 8, 2048),
        (8192, 4096, 128256, 10, 2048),  # a power of two
        (8192, 4096, 128256, 32, 8192),
        (100, 64, 64, 1, 100),  # all at once, and never more than there are
        (100, 64, 64, 3, 100),
        (100, 64, 65, 1, 64),
    ],
)
def test_chunks_follow_ligers_rule(tokens: int, width: int, vocabulary: int, chunk_mem_const: int, chunk: int) -> None:
    assert chunk_size(tokens, width, vocabulary, chunk_mem_const) == chunk


def tiny(**options: Any) -> Any:
    shape = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **heads, **options}))
    return model.to(torch.bfloat16).train()


def test_logits_are_never_whole_and_both_gradients_wait_for_the_backward() -> None:
    tokens = torch.zeros(4, 128, dtype=torch.long)
    with_logits = rehearse(tiny(), lambda model: model(input_ids=tokens, labels=tokens).loss)
    chunked = rehearse(LossOfLiger(tiny()), lambda model: model(tokens))
    logits, head, chunk = 2 * 512 * 1024, 2 * 1024 * 64, 2 * 32 * 1024
    assert chunk_size(512, 64, 1024) == 32
    assert with_logits.kept - chunked.kept > 2 * logits - head
    assert with_logits.peak(lambda _: 0) - chunked.peak(lambda _: 0) > 2 * logits - head - chunk
    assert with_logits.moments[-1].num_gradients == chunked.moments[-1].num_gradients


def test_larger_chunks_are_that_much_more_of_the_peak() -> None:
    tokens = torch.zeros(4, 128, dtype=torch.long)
    half, all_at_once = (rehearse(LossOfLiger(tiny(), times), lambda model: model(tokens)) for times in (8, 16))
    assert (chunk_size(512, 64, 1024, 8), chunk_size(512, 64, 1024, 16)) == (256, 512)
    assert all_at_once.peak(lambda _: 0) - half.peak(lambda _: 0) == 2 * 256 * 1024
    assert all_at_once.kept == half.kept


def test_of_gpt_oss_liger_takes_larger_chunks_by_itself() -> None:
    """As its own forward of that type of model has it; a key of more than 1 wins."""
    tokens = torch.zeros(4, 128, dtype=torch.long)

    def peak(model_type: str, *chunk_mem_const: int) -> int:
        model = tiny()
        model.config.model_type = model_type
        return rehearse(LossOfLiger(model, *chunk_mem_const), lambda model: model(tokens)).peak(lambda _: 0)

    assert peak("llama", 16) == peak("gpt_oss", 16) > peak("gpt_oss") == peak("llama", 8) > peak("llama")


def test_models_that_ligers_loss_does_not_take_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no causal LM of transformers"):
        LossOfLiger(nn.Linear(2, 2))
    model = tiny()
    model.lm_head = nn.Linear(64, 1024, bias=True, device="meta")
    with pytest.raises(UnsupportedError, match=r"no nn\.Linear in bf16 without bias"):
        LossOfLiger(model)
