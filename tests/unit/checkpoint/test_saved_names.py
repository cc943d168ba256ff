"""Names in a model's files are those of transformers' own save, and go back to the model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.errors import CheckpointError, UnsupportedError

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OF_DEEPSEEK = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 12},  # of which the tenth comes after the ninth, and not after the first
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 24, "head_dim": 16},
    "Qwen2Moe": {"num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "DeepseekV3": {"n_routed_experts": 4, "moe_intermediate_size": 24, **OF_DEEPSEEK},
    "Llama": {},
}


def model_of(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()


def readers_of(tensors: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    return {name: partial(tensors.__getitem__, name) for name in tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_tensors_are_those_of_save_pretrained_one_tensor_at_a_time(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    expected, names = load_file(tmp_path / "model.safetensors"), SavedNames.of_folder(tmp_path)
    parts = [names.saved(name, tensor) for name, tensor in model.state_dict().items()]
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(map(len, parts)) == len(expected)
    back = dict(names.loaded(readers_of(expected)))
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_what_the_model_does_not_know_keeps_its_name_and_is_loaded_as_it_is() -> None:
    names, extra = SavedNames(model_of("Mixtral")), torch.arange(3)
    assert [name for name, _ in names.loaded({"mtp.experts.0.w1.weight": lambda: extra})] == ["mtp.experts.0.w1.weight"]
    assert dict(SavedNames().loaded({"a": lambda: extra})) == {"a": extra} and SavedNames().saved("a", extra) == {
        "a": extra
    }


def test_an_expert_that_is_missing_is_an_error_that_names_the_weight() -> None:
    model = model_of("Qwen3Moe")
    names, files = SavedNames(model), {}
    for name, tensor in model.state_dict().items():
        files |= names.saved(name, tensor)
    del files["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        list(names.loaded(readers_of(files)))
    del files["model.layers.1.mlp.experts.2.gate_proj.weight"]
    with pytest.raises(CheckpointError, match=r"gate_up_proj: expected \[3, 48, 32\].*\[2, 48, 32\]"):
        list(names.loaded(readers_of(files)))


@pytest.mark.parametrize("name", ["model.model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"])
def test_tensors_of_another_model_are_refused_by_name(name: str) -> None:
    names = SavedNames(model_of("Mixtral"))
    with pytest.raises(UnsupportedError, match=r"--model, got .*mlp\.gate\.weight \[7, 32\]"):
        names.saved(name, torch.zeros(7, 32))


def test_weights_that_files_join_are_refused_by_name() -> None:
    from transformers.core_model_loading import Concatenate, WeightConverter

    names = SavedNames(model_of("Llama"))
    split = WeightConverter("qkv.weight", ["q_proj.weight", "k_proj.weight"], operations=[Concatenate().reverse_op])
    names._saves = [split.reverse_transform()]
    assert not names.is_kept("model.layers.0.self_attn.q_proj.weight")
    assert names.is_kept("model.layers.0.self_attn.o_proj.weight")
    with pytest.raises(UnsupportedError, match=r"one by one, got model\.layers\.0\.self_attn\.q_proj\.weight"):
        names.saved("model.layers.0.self_attn.q_proj.weight", torch.zeros(32, 32))


@pytest.mark.parametrize(
    "text", ["{}", '{"model_type": "of_nobody"}', '{"model_type": "x", "auto_map": {"AutoConfig": "c.C"}}']
)
def test_a_folder_of_another_model_keeps_the_names_and_no_code_in_it_runs(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "c.py").write_text("raise SystemExit")
    names = SavedNames.of_folder(tmp_path)
    assert names.model is None and str(tmp_path) in names.reason
