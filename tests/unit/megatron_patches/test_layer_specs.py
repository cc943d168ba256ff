"""Specs are Megatron's own but for the slots that we fill.

Transformer Engine is not installed where these tests run: its spec is stood in for by one of the same shape whose
classes are empty.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from packaging.version import Version

from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches import compat, layer_specs
from megatron_patches.attention import AttentionSettings
from megatron_patches.layer_specs import (
    MegatronFp8Layer,
    layer_spec,
    with_attention,
    with_fp8_linears,
)
from megatron_patches.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from megatron_patches.norm import SequenceParallelNorm
from megatron_patches.recipes import settings
from megatron_patches.refusals import refuse_final_norm

FP8 = settings("hybrid", "tensorwise")
REFERENCE = AttentionSettings("reference")


def config(**values: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, **values})


def modules(spec: ModuleSpec) -> dict[str, Any]:
    """Slot -> class, of a layer spec's attention and MLP."""
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    slots = {**vars(attention), **vars(mlp)}
    return {name: one.module if isinstance(one, ModuleSpec) else one for name, one in slots.items()}


def test_local_linears_are_replaced_and_nothing_else() -> None:
    stock = get_gpt_layer_local_spec()
    before = modules(copy.deepcopy(stock))
    ours = with_fp8_linears(stock, FP8)
    found = modules(ours)
    changed = {name: cls for name, cls in found.items() if cls is not before[name]}
    assert changed == {
        "linear_qkv": Fp8ColumnParallelLinear,
        "linear_proj": Fp8RowParallelLinear,
        "linear_fc1": Fp8ColumnParallelLinear,
        "linear_fc2": Fp8RowParallelLinear,
    }
    assert modules(stock) == before  # Megatron's own spec is as it was
    assert ours.submodules.mlp.submodules.linear_fc1.params == {"fp8": FP8}
    assert ours.submodules.sharded_state_dict_keys_map == stock.submodules.sharded_state_dict_keys_map != {}


class TELinear(torch.nn.Module):
    """As Transformer Engine's fused norm and linear, and its plain one."""


class TEDotProductAttention(torch.nn.Module):
    pass


def te_spec() -> ModuleSpec:
    """The shape of get_gpt_layer_with_transformer_engine_spec()."""
    attention = SelfAttentionSubmodules(linear_qkv=TELinear, core_attention=TEDotProductAttention, linear_proj=TELinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": "causal"}, submodules=attention),
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=TELinear, linear_fc2=TELinear)),
        ),
    )


def test_of_transformer_engines_spec_only_attention_is_replaced() -> None:
    stock = te_spec()
    before, found = modules(stock), modules(with_attention(stock, REFERENCE))
    assert issubclass(found.pop("core_attention"), TEDotProductAttention)
    assert before.pop("core_attention") is TEDotProductAttention
    assert found == before


def test_a_spec_without_linears_of_megatron_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Pass --transformer-impl local"):
        with_fp8_linears(te_spec(), FP8)


def test_mla_is_left_alone() -> None:
    stock = get_gpt_layer_local_spec(multi_latent_attention=True)
    ours = with_fp8_linears(stock, FP8)
    assert ours.submodules.self_attention == stock.submodules.self_attention
    assert ours.submodules.mlp.submodules.linear_fc1.module is Fp8ColumnParallelLinear
    with pytest.raises(UnsupportedError, match=r"expected a layer spec with a core_attention that is not MLA's"):
        with_attention(stock, REFERENCE)


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron is told that it builds all four layers."""
    from megatron.core.transformer import transformer_layer

    for module in (layer_specs.megatron_specs, transformer_block, transformer_layer):
        for name, value in (("get_num_layers_to_build", 4), ("get_transformer_layer_offset", 0)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *args, value=value, **kwargs: value)


@pytest.mark.parametrize("freq", [1, [0, 1, 0, 1]])
def test_experts_are_replaced_in_every_layer(freq: Any, one_stage: None) -> None:
    moe = config(num_moe_experts=4, moe_layer_freq=freq, moe_shared_expert_intermediate_size=64, add_bias_linear=False)
    spec = layer_spec(moe, use_transformer_engine=False, fp8=FP8, attention=REFERENCE)
    layers = [spec] if freq == 1 else spec.layer_specs
    assert len(layers) == (1 if freq == 1 else 4)
    for i, layer in enumerate(layers):
        assert issubclass(layer.module, MegatronFp8Layer)
        assert issubclass(layer.submodules.self_attention.submodules.core_attention.module, DotProductAttention)
        mlp = layer.submodules.mlp
        inner = mlp.submodules
        parts = [inner.experts.submodules, inner.shared_experts.submodules] if freq == 1 or i % 2 else [inner]
        for part in parts:
            assert (part.linear_fc1.module, part.linear_fc2.module) == (Fp8ColumnParallelLinear, Fp8RowParallelLinear)


def test_a_spec_that_megatron_calls_is_of_the_stage_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[Any] = []

    def block(config: Any, use_transformer_engine: bool, vp_stage: int, **others: Any) -> Any:
        stages.append(vp_stage)
        return TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec()] * 2)

    monkeypatch.setattr(layer_specs.megatron_specs, "get_gpt_decoder_block_spec", block)
    moe = config(num_moe_experts=4, moe_layer_freq=[0, 1, 0, 1], add_bias_linear=False)
    later = layer_specs.later_spec(use_transformer_engine=False, fp8=FP8, attention=None)
    for stage in (0, 1):
        spec = later(SimpleNamespace(transformer=moe), vp_stage=stage)
        assert [modules(layer)["linear_fc1"] for layer in spec.layer_specs] == [Fp8ColumnParallelLinear] * 2
    assert stages == [0, 1]


def test_a_stage_without_layers_is_left_as_it_is() -> None:
    empty = TransformerBlockSubmodules(layer_specs=[])
    assert with_attention(with_fp8_linears(empty, FP8), REFERENCE).layer_specs == []


def test_alternating_experts_under_virtual_stages_are_refused() -> None:
    values = {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "virtual_pipeline_model_parallel_size": 2}
    fake = SimpleNamespace(num_layers=4, **values)
    with pytest.raises(UnsupportedError, match=r"--num-layers-per-virtual-pipeline-stage: expected none"):
        layer_specs.megatron_layer_spec(fake, use_transformer_engine=False)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("experimental_attention_variant", "dsa", "--experimental-attention-variant"),
        ("heterogeneous_layers_config_path", "layers.json", "--heterogeneous-layers-config-path"),
        ("use_kitchen", True, "--kitchen-config-file, --kitchen-recipe-number"),
        ("use_kitchen_attention", True, "--use-kitchen-attention"),
        ("transformer_impl", "inference_optimized", "--transformer-impl"),
    ],
)
def test_layers_that_megatron_builds_only_without_a_spec_are_refused(field: str, value: Any, flag: str) -> None:
    """They would be left out in silence: another model."""
    other = config()
    setattr(other, field, value)
    with pytest.raises(UnsupportedError, match=flag):
        layer_specs.megatron_layer_spec(other, use_transformer_engine=False)


def test_attention_for_transformer_engines_layers_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "transformer_engine", lambda: compat.TransformerEngine(False, "not installed"))
    with pytest.raises(UnsupportedError, match=r"--transformer-impl: expected Transformer Engine, got none \(not inst"):
        layer_spec(config(attention_dropout=0.0), use_transformer_engine=True, attention=REFERENCE)


@pytest.mark.parametrize(("first", "last"), [(5, 1), (2, 2), (4, 0), (-1, 1)])
def test_bf16_layers_alone_are_no_fp8(first: int, last: int) -> None:
    values = {"num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    with pytest.raises(ConfigError, match=rf"--first-last-layers-bf16: .* got {first} at the start and {last} at the"):
        layer_spec(config(first_last_layers_bf16=True, **values), use_transformer_engine=False, fp8=FP8)
    layer_spec(config(first_last_layers_bf16=True, **values), use_transformer_engine=False)
    layer_spec(config(**values), use_transformer_engine=False, fp8=FP8)
    one_left = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    layer_spec(config(first_last_layers_bf16=True, **one_left), use_transformer_engine=False, fp8=FP8)


def test_fp8_without_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_specs, "megatron_layer_spec", lambda *args, **kwargs: te_spec())
    fp8 = config(fp8="hybrid", fp8_recipe="tensorwise")
    with pytest.raises(
        UnsupportedError, match=r"expected Transformer Engine, got none .* pass --transformer-impl local"
    ):
        layer_spec(fp8, use_transformer_engine=True)
    with pytest.raises(ConfigError, match=r"--fp8-recipe: expected one of Megatron's"):
        layer_spec(config(), use_transformer_engine=True, fp8=FP8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            "--recompute-granularity: expected selective or none .* got full",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
            "--recompute-modules: expected core_attn alone .* got mlp",
        ),
        ({"recompute_granularity": "selective"}, None),
    ],
)
def test_what_megatron_recomputes_by_transformer_engine_is_refused(values: dict[str, Any], message: str | None) -> None:
    layer_spec(config(**values), use_transformer_engine=False, fp8=FP8)  # the wrapper's: no FP8 in Megatron's own
    of_stock_script = config(fp8="hybrid", fp8_recipe="tensorwise", **values)
    if message is None:
        layer_spec(of_stock_script, use_transformer_engine=False)
        return
    with pytest.raises(UnsupportedError, match=message):
        layer_spec(of_stock_script, use_transformer_engine=False)


def test_torchs_norm_after_the_last_layer_is_refused_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = config(sequence_parallel=True, tensor_model_parallel_size=2)
    with pytest.raises(
        UnsupportedError, match=r"--sequence-parallel: expected off .* use `-m megatron_patches.pretrain_gpt`"
    ):
        refuse_final_norm(parallel)
    refuse_final_norm(config(tensor_model_parallel_size=2))
    monkeypatch.setattr(transformer_block, "LayerNormImpl", SequenceParallelNorm)  # as the wrapper does
    refuse_final_norm(parallel)


@pytest.fixture
def stock_script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its arguments, with --spec megatron_patches.layer_specs gpt_reference."""
    args = SimpleNamespace(
        spec=["megatron_patches.layer_specs", "gpt_reference"], transformer_impl="local", fp8=None, fp8_recipe="delayed"
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", SimpleNamespace(
        core_transformer_config_from_args=lambda args: config(attention_dropout=0.0)
    ))  # fmt: skip
    return args


def test_the_stock_scripts_recipe_without_a_format_is_refused(
    stock_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe, words in (("tensorwise", []), ("delayed", ["--fp8-recipe", "delayed"])):
        stock_script.fp8_recipe = recipe
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        with pytest.raises(ConfigError, match=rf"expected --fp8-format with it, got {recipe} and no format"):
            layer_specs._objects()


def test_the_stock_scripts_mask_of_documents_is_refused(stock_script: SimpleNamespace) -> None:
    args = stock_script
    args.reset_attention_mask = True
    with pytest.raises(UnsupportedError, match=r"--reset-attention-mask: expected off with attention by fp8_ds \(ref"):
        layer_specs._objects()
    args.reset_attention_mask = False
    assert list(layer_specs._objects()) == ["gpt_reference"]


@pytest.mark.parametrize(("version", "builds"), [("0.16.1", False), ("0.19.1", True)])
def test_multi_token_prediction_is_refused_where_megatron_cannot_build_it_beside_a_spec(
    stock_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, builds: bool
) -> None:
    monkeypatch.setattr(compat, "version", lambda: Version(version))
    monkeypatch.setattr(layer_specs.patches, "check", lambda *parts: None)
    stock_script.mtp_num_layers = 1
    if builds:
        assert list(layer_specs._objects()) == ["gpt_reference"]
        return
    with pytest.raises(
        UnsupportedError, match=r"--mtp-num-layers: expected none with a layer spec in Megatron 0\.16\.1"
    ):
        layer_specs._objects()


def test_the_name_and_the_flag_say_which_attention(stock_script: SimpleNamespace) -> None:
    for name, backend in (("gpt_reference", "reference"), ("gpt_fa3_fp8_emulated", "fa3_fp8_emulated")):
        stock_script.spec[1], stock_script.fp8_attention_hadamard = name, backend != "reference"
        spec = layer_specs._objects()[name]
        settings = spec.submodules.self_attention.submodules.core_attention.params["fp8_attention"]
        assert settings == AttentionSettings(backend, backend != "reference")


def test_a_backend_that_is_not_there_is_refused_before_layers_are_built(
    stock_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline stage may have none."""
    stock_script.spec[1] = "gpt_fa3"
    monkeypatch.setattr(layer_specs.parallel_state, "model_parallel_is_initialized", lambda: True)
    with pytest.raises(UnsupportedError, match=r"FlashAttention-3: expected a Hopper GPU .*, got cpu"):
        layer_specs._objects()
    dropout = SimpleNamespace(core_transformer_config_from_args=lambda args: config(attention_dropout=0.1))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", dropout)
    assert list(layer_specs._objects()) == ["gpt_fa3"]


def test_norms_of_queries_and_keys_are_those_asked_for(one_stage: None) -> None:
    from megatron.core.transformer.torch_norm import L2Norm

    moe = config(num_moe_experts=4, moe_layer_freq=[0, 1, 0, 1], add_bias_linear=False, qk_l2_norm=True)
    spec = layer_specs.megatron_layer_spec(moe, use_transformer_engine=False)
    for layer in getattr(spec, "layer_specs", [spec]):
        assert layer.submodules.self_attention.submodules.q_layernorm is L2Norm


def test_without_fp8_or_attention_linears_are_stock() -> None:
    found = modules(layer_spec(config(), use_transformer_engine=False))
    assert (found["linear_qkv"], found["linear_fc2"]) == (ColumnParallelLinear, RowParallelLinear)
    assert found["core_attention"] is DotProductAttention


def test_an_object_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(spec=["megatron_patches.layer_specs", "gpt_fa4"])
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    with pytest.raises(ConfigError, match=r"expected one of gpt, gpt_fa3, .* got gpt_fa4"):
        layer_specs._objects()
