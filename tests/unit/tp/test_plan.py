"""Plans of tensor parallelism: what a rank's part of a model is, and which plans are refused, over a fake group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import HIDDEN, MIXTRAL_PLAN, WIDTH, MixerModel
from support.models import MIXER_PLAN as PLAN
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_ds.config import TensorParallelConfig
from fp8_ds.errors import ConfigError
from fp8_ds.tp import LLAMA, QWEN3, TensorParallelPlan, configure, parallelize
from fp8_ds.tp.group import fingerprint

SIZE = 2


@pytest.fixture(autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    """Rank 0 of two, of which the other answers what this one says."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}


def test_a_rank_has_its_rows_of_columns_its_columns_of_rows_and_all_else_whole(group: Any) -> None:
    model = MixerModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallelize(model, PLAN, group)
    for name, p in model.named_parameters():
        whole = before[name]
        if ".up." in name:
            whole = whole[: HIDDEN // SIZE]
        elif name.endswith("down.weight"):
            whole = whole[:, : HIDDEN // SIZE]
        assert torch.equal(p, whole), name
        assert getattr(p, "tensor_model_parallel", False) is (p.shape != before[name].shape), name
    assert model.layers[0].mixer.down.weight.partition_dim == 1


def transformers_model(family: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    return model


def changed(change: Callable[[Any], None]) -> nn.Module:
    model = MixerModel()
    change(model.layers[1])
    return model


def share_weights(layer: Any) -> None:
    layer.mixer.down.weight = nn.Parameter(layer.mixer.down.weight.t())
    layer.mixer.up.weight = layer.mixer.down.weight


REFUSED: dict[str, tuple[Callable[[], nn.Module], TensorParallelPlan, str]] = {
    "a norm beside a block": (
        lambda: changed(lambda layer: setattr(layer, "norm_after", nn.LayerNorm(WIDTH))),
        PLAN,
        "in_shards.*layers.1.norm_after.weight",
    ),
    "a weight twice": (lambda: changed(share_weights), PLAN, "layers.1.mixer.down: a Parameter that layers.1.mixer.up"),
    "odd features": (
        lambda: changed(lambda layer: setattr(layer.mixer, "up", nn.Linear(WIDTH, HIDDEN - 1))),
        PLAN,
        "layers.1.mixer.up: .*63 features",
    ),
    "odd heads": (
        lambda: transformers_model("Llama", num_key_value_heads=1),
        LLAMA,
        "self_attn.k_proj: .*1 heads of 8",
    ),
    "sharded, named in shards": (MixerModel, replace(PLAN, in_shards=(*PLAN.in_shards, "layers.*.mixer")), "mixer.up"),
    "sharded, named in heads": (MixerModel, replace(PLAN, in_heads=("layers.1.mixer.up",)), "layers.1.mixer.up"),
    "in two places": (MixerModel, replace(PLAN, row=(*PLAN.row, "layers.1.mixer.up")), "layers.1.mixer.up"),
    "heads of no known size": (MixerModel, replace(PLAN, heads=PLAN.column, column=()), "head_dim"),
    "no such names": (MixerModel, LLAMA, "plan: .*q_proj"),
    "Gemma 2 as a Llama": (lambda: transformers_model("Gemma2"), LLAMA, "in_shards.*pre_feedforward_layernorm.weight"),
    "Qwen 3 as a Llama": (lambda: transformers_model("Qwen3"), LLAMA, "in_heads.*q_norm.weight"),
    "Mixtral as a Llama": (lambda: transformers_model("Mixtral"), LLAMA, "plan: .*gate_proj"),
    "sharded experts": (
        lambda: transformers_model("Mixtral"),
        replace(MIXTRAL_PLAN, column=("*layers.*.mlp.experts",)),
        "in_shards",
    ),
    "experts in a block": (
        lambda: transformers_model("Mixtral"),
        replace(MIXTRAL_PLAN, blocks=(*MIXTRAL_PLAN.blocks, "*layers.*.mlp")),
        "in_heads",
    ),
    "experts not named": (
        lambda: transformers_model("Mixtral"),
        replace(MIXTRAL_PLAN, in_shards=LLAMA.in_shards),
        "in_shards.*mlp.gate",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_is_as_before(group: Any, case: str) -> None:
    build, plan, match = REFUSED[case]
    model = build()
    before = shapes(model)
    with pytest.raises(ConfigError, match=f"(?s){match}"):
        parallelize(model, plan, group)
    assert shapes(model) == before


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_plans_of_transformers_models_fit(group: Any, family: str) -> None:
    model = transformers_model(family)
    before = shapes(model)
    parallelize(model, {"Llama": LLAMA, "Qwen3": QWEN3}[family], group)
    num_sharded = sum(shape != before[name] for name, shape in shapes(model).items())
    assert num_sharded == 7


@pytest.mark.parametrize(
    "changes",
    [{"column": "layers.*.mixer.up"}, {"in_heads": None}, {"row": ("",)}, {"first": None}, {"last": ("last",)}],
    ids=str,
)
def test_a_field_that_is_no_pattern_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"plan.{name}"):
        replace(PLAN, **changes)


def test_a_sharded_model_is_not_copied(group: Any) -> None:
    model = MixerModel()
    parallelize(model, PLAN, group)
    with pytest.raises(ConfigError, match="no copy of a model"):
        copy.deepcopy(model)


@pytest.mark.parametrize("ends", [{"first": "last", "last": "layers.0"}, {}], ids=str)
def test_tokens_that_cannot_be_sharded_are_refused(group: Any, ends: dict[str, str]) -> None:
    """The end runs before the beginning, or the input has no dim of sequences."""
    model = MixerModel()
    parallelize(model, replace(PLAN, **ends), group)
    with pytest.raises(ValueError, match="first.*last" if ends else "batch, sequence, channels"):
        model(torch.ones(1, 8, WIDTH) if ends else torch.ones(8, WIDTH))


def test_a_configuration_that_cannot_take_effect_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match="config"):
        parallelize(MixerModel(), PLAN, group, config={"gather": "bf16"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fp8\.tensor_parallel"):
        configure(MixerModel(), TensorParallelConfig(gather="bf16"), "tensorwise")
    model = MixerModel()
    parallelize(model, PLAN, group)
    for recipe in ("delayed", "rowwise_with_gw_hp"):
        with pytest.raises(ConfigError, match=r"fp8\.linear\.recipe"):
            configure(model, TensorParallelConfig(), recipe)
        configure(model, TensorParallelConfig(gather="bf16"), recipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_token_of_a_large_batch_may_differ(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8192, 16, dtype=dtype)
    before = fingerprint(x)
    assert fingerprint(x.clone()) == before
    for token in (0, 1, 4097, 8191):
        changed_x = x.clone()
        changed_x[1, token, 7] += 1
        assert fingerprint(changed_x) != before
    assert fingerprint(x.flip(1)) != before
