"""Experts of FP8 folders become those that the model's own code makes, or are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8_folders import EXPERTS, load, write
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.engine.compat.model import refuse_stored
from fp8_ds.engine.folder_experts import own_experts
from fp8_ds.engine.folder_model import as_bytes, make_plain, take_over
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.moe.experts import WEIGHTS, is_stock_experts
from fp8_ds.nn.moe.products import MAX_IN_A_LOOP
from fp8_ds.nn.plan.plan import make_plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.finegrained_fp8")

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(params=["Mixtral", "Qwen3Moe"])
def model(request: Any, tmp_path: Path) -> Any:
    write(str(tmp_path), "blocks", EXPERTS[request.param], request.param)
    return load(str(tmp_path))


def fresh(model: Any) -> Any:
    """The experts of a model of this kind that was never quantised."""
    return type(model)(copy.deepcopy(model.config)).get_submodule(LAYER)


def public(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "config"}


def test_experts_become_the_models_own_with_the_same_parameters_and_hooks(model: Any) -> None:
    module, config = model.get_submodule(LAYER), model.config
    assert type(module).__name__ == "FP8Experts"
    before, own, calls = dict(model.named_parameters()), fresh(model), []
    module.register_forward_hook(lambda *args: calls.append(1))
    values = {name: p.detach().float() for name, p in module.named_parameters()}
    random = torch.get_rng_state()
    for _ in range(2):
        refuse_stored(model, {}, is_split=False)
        make_plain(model)
        assert model.get_submodule(LAYER) is module and type(module) is type(own) and is_stock_experts(module)
        assert public(module) == public(own) | {"training": module.training} and module.config is config
        assert vars(module).keys() == vars(own).keys()
        after = dict(model.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert not any(p.requires_grad for name, p in after.items() if "scale" in name)
        assert module.gate_up_proj.requires_grad and module.down_proj.requires_grad
        assert list(module._modules) == ["act_fn"] and module.act_fn.training == module.training
    assert torch.equal(torch.get_rng_state(), random)
    model.init_weights()  # transformers' own, which passes over what has its values
    assert all(torch.equal(p.float(), values[name]) for name, p in module.named_parameters())
    stored = take_over(model, (), torch.bfloat16)
    assert list(module._parameters) == ["gate_up_proj", "down_proj"]
    assert {id(module.gate_up_proj), id(module.down_proj)} < stored.keys()
    model(input_ids=torch.arange(8)[None])
    assert calls == [1]


def test_experts_below_wrappers_are_found(model: Any) -> None:
    """As a user's own module and PEFT have them, whose names no model without adapters has."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    wrapped: Any = nn.Sequential(peft.get_peft_model(model, config))
    module = next(one for one in wrapped.modules() if type(one).__name__ == "FP8Experts")
    assert own_experts(wrapped).keys() == {module}
    make_plain(wrapped)
    assert type(module) is type(fresh(model))


def plan_of(model: Any, frozen: str = "fp8", recipe: str = "tensorwise") -> dict[str, tuple[bool, str]]:
    config = LinearConfig.model_validate({"frozen": frozen, "recipe": recipe})
    rows = make_plan(model, config, may_be_empty=True, device=torch.device("cpu")).layers
    return {row.fqn.rpartition(".")[2]: (row.converted, row.reason) for row in rows if row.num_experts}


def loaded(folder: Path, **sizes: int) -> Any:
    write(str(folder), "blocks", EXPERTS["Qwen3Moe"] | sizes, "Qwen3Moe")
    model = load(str(folder))
    make_plain(model)
    return model.requires_grad_(False)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "rowwise"])
def test_frozen_experts_keep_their_bytes_however_many_there_are(tmp_path: Path, recipe: str) -> None:
    """Of those that train more than 16 would stay bf16 on this device, and any with scales of rows or blocks."""
    model = loaded(tmp_path, num_experts=MAX_IN_A_LOOP + 1)
    assert plan_of(model, recipe=recipe) == dict.fromkeys(WEIGHTS, (True, "frozen"))
    assert not any(converted for converted, _ in plan_of(model, "bf16", recipe).values())
    model.get_submodule(LAYER).down_proj.requires_grad_()
    found = plan_of(model, recipe=recipe)
    assert found["gate_up_proj"] == (True, "frozen") and not found["down_proj"][0]


def test_frozen_experts_whose_blocks_end_within_an_expert_stay_bf16(tmp_path: Path) -> None:
    found = plan_of(loaded(tmp_path, hidden_size=192))
    assert found["gate_up_proj"] == (True, "frozen")
    assert found["down_proj"] == (False, "frozen, and its FP8 folder has blocks of less than 128 rows")


def test_bytes_of_experts_pass_casts_of_the_model(model: Any) -> None:
    make_plain(model)
    module = model.get_submodule(LAYER)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with as_bytes(model):
        assert all(p.dtype == torch.uint8 for p in module.parameters())
        model.bfloat16()
    for name, p in module.named_parameters():
        assert p.dtype == before[name].dtype and torch.equal(p.view(torch.uint8), before[name].view(torch.uint8))
        assert p.requires_grad == ("scale" not in name)


def is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{LAYER}\.gate_up_proj of a FP8Experts.*dequantize=True"):
        refuse_stored(model, {}, is_split=False)


def test_experts_that_are_not_as_mixtrals_are_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = type(fresh(model))

    def forward(self: Any, *args: Any) -> Any:
        return own.forward(self, *args)

    other = type(own.__name__, (own,), {"forward": forward})
    monkeypatch.setattr(f"{own.__module__}.{own.__name__}", other)
    is_refused(model)


def test_experts_of_a_model_whose_class_wants_more_than_a_config_are_refused_by_name(model: Any) -> None:
    class Wants(type(model.model)):  # type: ignore[misc]
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    model.model.__class__ = Wants
    is_refused(model)


def test_experts_whose_forward_or_scales_are_others_are_refused_by_name(model: Any) -> None:
    module = model.get_submodule(LAYER)
    module.forward = lambda *args: args[0]
    is_refused(model)
    del module.forward
    refuse_stored(model, {}, is_split=False)
    module.gate_up_proj_scale_inv = nn.Parameter(torch.ones(4, 1, 1))
    is_refused(model)


def test_models_without_experts_in_fp8_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(str(tmp_path), "blocks", {"hidden_size": 128, "intermediate_size": 300, "num_attention_heads": 2})
    model = load(str(tmp_path))
    monkeypatch.setattr(type(model.model), "__init__", None)
    assert own_experts(model) == {} and own_experts(nn.Linear(2, 2)) == {}
    make_plain(model)
