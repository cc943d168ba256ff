"""Specs are Megatron's own but for the slots that we fill.

Transformer Engine is not installed where these tests run: its spec is stood in for by one of the same shape whose
classes are empty.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
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
WITH_ATTENTION = partial(with_attention, settings=REFERENCE)


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


def te_spec() -> ModuleSpec:
    """The shape of get_gpt_layer_with_transformer_engine_spec()."""
    linear, core = (type(name, (torch.nn.Module,), {}) for name in ("TELinear", "TEDotProductAttention"))
    attention = SelfAttentionSubmodules(linear_qkv=linear, core_attention=core, linear_proj=linear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": "causal"}, submodules=attention),
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=linear, linear_fc2=linear)),
        ),
    )


def test_attention_alone_is_replaced_in_transformer_engines_spec_and_linears_alone_in_mlas() -> None:
    stock = te_spec()
    before, found = modules(stock), modules(with_attention(stock, REFERENCE))
    assert issubclass(found.pop("core_attention"), before.pop("core_attention"))
    assert found == before
    latents = get_gpt_layer_local_spec(multi_latent_attention=True)
    ours = with_fp8_linears(latents, FP8)
    assert ours.submodules.self_attention == latents.submodules.self_attention
    assert ours.submodules.mlp.submodules.linear_fc1.module is Fp8ColumnParallelLinear
    with pytest.raises(UnsupportedError, match="--transformer-impl local"):
        with_fp8_linears(stock, FP8)
    with pytest.raises(UnsupportedError, match="core_attention that is not MLA's"):
        WITH_ATTENTION(latents)
    empty = TransformerBlockSubmodules(layer_specs=[])  # of a pipeline stage without layers
    assert WITH_ATTENTION(with_fp8_linears(empty, FP8)).layer_specs == []
    plain = modules(layer_spec(config(), use_transformer_engine=False))
    assert (plain["linear_qkv"], plain["linear_fc2"]) == (ColumnParallelLinear, RowParallelLinear)
    assert plain["core_attention"] is DotProductAttention


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
    from megatron.core.transformer.torch_norm import L2Norm

    experts = {"num_moe_experts": 4, "moe_layer_freq": freq, "moe_shared_expert_intermediate_size": 64}
    moe = config(**experts, add_bias_linear=False, qk_l2_norm=True)
    spec = layer_spec(moe, use_transformer_engine=False, fp8=FP8, attention=REFERENCE)
    layers = [spec] if freq == 1 else spec.layer_specs
    assert len(layers) == (1 if freq == 1 else 4)
    for i, layer in enumerate(layers):
        assert issubclass(layer.module, MegatronFp8Layer)
        assert issubclass(layer.submodules.self_attention.submodules.core_attention.module, DotProductAttention)
        assert layer.submodules.self_attention.submodules.q_layernorm is L2Norm
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


def other_config(**values: Any) -> TransformerConfig:
    """A configuration with fields that are not checked against each other."""
    found = config()
    vars(found).update(values)
    return found


IN_FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
VIRTUAL = {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "virtual_pipeline_model_parallel_size": 2}


def ends_in_bf16(first: int, last: int) -> TransformerConfig:
    ends = {"num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    return config(first_last_layers_bf16=True, **ends)


@pytest.mark.parametrize(
    ("made", "options", "flag"),
    [  # what Megatron builds only without a spec would be left out in silence: another model
        (other_config(experimental_attention_variant="dsa"), {}, "--experimental-attention-variant"),
        (other_config(heterogeneous_layers_config_path="x.json"), {}, "--heterogeneous-layers-config-path"),
        (other_config(use_kitchen=True), {}, "--kitchen-config-file, --kitchen-recipe-number"),
        (other_config(use_kitchen_attention=True), {}, "--use-kitchen-attention"),
        (other_config(transformer_impl="inference_optimized"), {}, "--transformer-impl"),
        (other_config(**VIRTUAL), {}, "--num-layers-per-virtual-pipeline-stage"),
        (config(**IN_FP8, **FULL), {}, "--recompute-granularity: .* got full"),
        (config(**IN_FP8, **SELECTIVE, recompute_modules=["core_attn", "mlp"]), {}, "--recompute-modules: .* got mlp"),
        *((ends_in_bf16(*ends), {"fp8": FP8}, "--first-last-layers-bf16") for ends in ((5, 1), (2, 2), (-1, 1))),
        (config(attention_dropout=0.0), {"use_transformer_engine": True, "attention": REFERENCE}, "--transformer-impl"),
        (config(**IN_FP8), {"use_transformer_engine": True}, "--transformer-impl local"),
        (config(), {"use_transformer_engine": True, "fp8": FP8}, "--fp8-recipe: expected one of Megatron's"),
    ],
)
def test_layers_that_cannot_be_built_as_asked_for_are_refused(
    made: TransformerConfig, options: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "transformer_engine", lambda: compat.TransformerEngine(False, "not installed"))
    if options.get("use_transformer_engine"):
        monkeypatch.setattr(layer_specs, "megatron_layer_spec", lambda *args, **kwargs: te_spec())
    with pytest.raises((UnsupportedError, ConfigError), match=flag):
        layer_spec(made, **{"use_transformer_engine": False, **options})


@pytest.mark.parametrize(
    ("made", "fp8"),
    [
        (config(**FULL), FP8),
        (config(**IN_FP8, **SELECTIVE), None),
        (ends_in_bf16(2, 2), None),
        (ends_in_bf16(2, 1), FP8),
    ],
)
def test_layers_like_them_that_can_be_built_are_not(made: TransformerConfig, fp8: Any) -> None:
    layer_spec(made, use_transformer_engine=False, fp8=fp8)


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


REFUSED_OF_SCRIPT: list[tuple[dict[str, Any], list[str], str]] = [
    ({"fp8_recipe": "tensorwise"}, [], "--fp8-format with it, got tensorwise"),
    ({}, ["--fp8-recipe", "delayed"], "--fp8-format with it, got delayed"),
    ({"reset_attention_mask": True}, [], "--reset-attention-mask"),
    ({"mtp_num_layers": 1}, [], "--mtp-num-layers"),
    ({"spec": ["megatron_patches.layer_specs", "gpt_fa4"]}, [], "expected one of gpt, gpt_fa3, .* got gpt_fa4"),
]


@pytest.mark.parametrize(("values", "words", "message"), REFUSED_OF_SCRIPT)
def test_flags_of_the_stock_script_that_do_not_fit_are_refused(
    stock_script: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    monkeypatch.setattr(compat, "version", lambda: Version("0.16.1"))
    vars(stock_script).update(values)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        layer_specs._objects()


def test_later_versions_of_megatron_build_multi_token_prediction_beside_a_spec(
    stock_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda: Version("0.19.1"))
    monkeypatch.setattr(layer_specs.patches, "check", lambda *parts: None)
    stock_script.mtp_num_layers = 1
    assert list(layer_specs._objects()) == ["gpt_reference"]


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
