"""What is fused in models of transformers, of the examples and of the benchmarks, and which linears share a scale."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.nn.fused.module import FusedModule
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.recipes import Bf16Recipe
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers, set_leaders
from fp8_ds.nn.plan.plan import make_plan

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
FEW_EXPERTS = {"num_local_experts": 4}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
QKV, GATE_UP = "q_proj k_proj v_proj", "gate_proj up_proj"
ATTENTION, MLP = {"input_layernorm": QKV}, {"post_attention_layernorm": GATE_UP, "mlp": "down_proj"}
LLAMA = ATTENTION | MLP

Fused = dict[str, str]
"""Name of a fused module in its layer -> its readers."""


def transformers_model(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SHAPE | more))


def last(name: str) -> str:
    return name.rpartition(".")[2]


def fuse(model: nn.Module) -> tuple[Fused, set[str], set[str]]:
    """(what is fused, names of what is not, the linears of a layer that quantise by the scale of one of them)"""
    config = LinearConfig(recipe="delayed", backend="reference")
    model.bfloat16()
    apply_plan(model, make_plan(model, config), config, "cpu")
    left = {last(fqn) for fqn, _ in fuse_producers(model, ActivationsConfig(fused=True)).left}
    names = {module: last(fqn) for fqn, module in model.named_modules()}
    fused = {
        last(fqn): " ".join(names[reader] for reader in module.fp8_producer.readers)
        for fqn, module in model.named_modules()
        if isinstance(module, FusedModule)
    }
    shared: dict[int, list[str]] = {}
    for fqn, layer in fp8_layers(model).items():
        if layer.fp8_recipe.leader is not None:
            shared.setdefault(layer.fp8_recipe.leader.amax_local.data_ptr(), []).append(last(fqn))
    return fused, left, {" ".join(group) for group in shared.values()}


@pytest.mark.parametrize(
    ("kind", "more", "fused", "left", "shared"),
    [
        ("llama", {}, LLAMA, {"norm"}, {QKV, GATE_UP}),
        ("qwen3", {}, LLAMA, {"q_norm", "k_norm", "norm"}, {QKV, GATE_UP}),
        ("gemma", {}, {}, {"mlp", *ATTENTION, *MLP, "norm"}, {QKV, GATE_UP}),
        (
            "phi3",
            {},
            {"input_layernorm": "qkv_proj", "post_attention_layernorm": "gate_up_proj"},
            {"norm"},
            set(),
        ),
        ("mixtral", FEW_EXPERTS, ATTENTION, {"post_attention_layernorm", "norm"}, {QKV}),
        (
            "deepseek_v3",
            DEEPSEEK,
            {
                "input_layernorm": "q_a_proj kv_a_proj_with_mqa",
                "q_a_layernorm": "q_b_proj",
                "post_attention_layernorm": GATE_UP,
                "mlp": "down_proj",
                "shared_experts": "down_proj",
            },
            {"kv_a_layernorm", "post_attention_layernorm", "norm"},
            {"q_a_proj kv_a_proj_with_mqa", GATE_UP},
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_of_transformers(kind: str, more: dict[str, Any], fused: Fused, left: set[str], shared: set[str]) -> None:
    assert fuse(transformers_model(kind, **more)) == (fused, left, shared)


def test_of_the_example(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention calls q, k and v in a generator, which is not followed."""
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    model = importlib.import_module("model")
    fused = {"mlp_norm": GATE_UP, "mlp": "down_proj"}
    assert fuse(model.ByteLlama(model.SIZES["tiny"])) == (fused, {"attention_norm", "norm"}, {GATE_UP})


def test_a_layer_that_records_no_amaxes_leads_nobody() -> None:
    """The others would quantise by a scale that nobody updates; one that comes back leads again."""
    model, config = transformers_model("llama"), LinearConfig(recipe="delayed", backend="reference")
    apply_plan(model, make_plan(model, config), config, "cpu")
    q, k, v = (fp8_layers(model)[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv")
    recipe: Any = q.fp8_recipe
    for is_plain, leader in ((True, k.fp8_recipe), (False, recipe)):
        q.fp8_recipe = Bf16Recipe(recipe, is_plain)
        set_leaders(model)
        assert all(layer.fp8_recipe.leader is leader.slot_x for layer in (k, v))
