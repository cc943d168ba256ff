"""Models from a command line: which attention they are built with, and how long their sequences may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.errors import ConfigError
from fp8_ds.tools.estimate.model_spec import FAMILIES, ModelSpec, loss_of, read_spec, sequence_length

pytest.importorskip("transformers")
NEO = {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": 64}
NEO |= {"num_heads": 4}
MPT = {"model_type": "mpt", "d_model": 64, "n_layers": 1, "n_heads": 4, "max_seq_len": 32, "vocab_size": 97}
OPT = {"num_hidden_layers": 1, "hidden_size": 64, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 64}


@pytest.mark.parametrize(
    ("spec", "positions"),
    [
        (ModelSpec("gpt2", FAMILIES["gpt2"] | {"n_layer": 1}), 1024),
        (ModelSpec("opt", {"model_type": "opt", "max_position_embeddings": 98, **OPT}), 100),  # two are for padding
    ],
)
def test_a_model_with_learned_positions_has_no_longer_sequences(spec: ModelSpec, positions: int) -> None:
    model = spec.build()
    assert sequence_length(model, None) == sequence_length(model, positions) == positions
    with pytest.raises(ConfigError, match=rf"--seq: expected at most {positions}, .* got {positions + 1}\."):
        sequence_length(model, positions + 1)


def test_rotary_positions_and_small_vocabularies_limit_nothing() -> None:
    small = ["hidden_size=64", "intermediate_size=64", "num_hidden_layers=1", "vocab_size=16"]
    model = read_spec("llama-8b", [*small, "num_attention_heads=4", "num_key_value_heads=2"]).build()
    assert sequence_length(model, None) == 4096 and sequence_length(model, 10**6) == 10**6
    assert sequence_length(nn.Linear(2, 2), None) == 4096


def test_a_class_with_an_attention_of_its_own_is_built_with_it_and_has_its_mask() -> None:
    """GPT-Neo looks into a table in which the estimate's function is not; MPT needs the mask that transformers leaves
    out for one from the registry."""
    assert next(ModelSpec("neo", NEO).build().parameters()).is_meta
    model = ModelSpec("mpt", MPT).build()
    with torch.device("meta"):
        assert loss_of(model, 2, 4).shape == ()


def test_floats_that_transformers_writes_as_objects_are_read(tmp_path: Path) -> None:
    """`save_pretrained` of transformers 5 does with Mamba 2, and hybrids with such layers."""
    infinity = {"__float__": "Infinity"}
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2}
    config = {"model_type": "mamba2", "time_step_limit": [0.0, infinity], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(str(tmp_path)).build().config.time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    ("forward", "got"),
    [(lambda tokens: tokens.float(), r"a tensor \[2, 5\]"), (lambda tokens: (tokens.float().mean(), 1), "tuple")],
)
def test_a_forward_that_does_not_return_the_loss_is_named(forward: Any, got: str) -> None:
    model = nn.Module()
    model.forward = forward
    with pytest.raises(ConfigError, match=f"expected the loss, a scalar, .* on tokens \\[2, 5\\], got {got}"):
        loss_of(model, 2, 4)
