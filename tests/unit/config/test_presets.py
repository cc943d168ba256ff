"""What a preset comes to, by what the block writes and what is known of the run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fp8_ds.config import Fp8Config
from fp8_ds.config.presets import MIN_STEPS, PRESETS, Facts
from fp8_ds.errors import ConfigError

ENDS = ("model.layers.0.", "model.layers.31.")
IN_BF16 = dict.fromkeys(ENDS, "bf16")
KNOWN, UNKNOWN = Facts(1000, ENDS), Facts(None, ENDS)
AUTO_GEMMS = {"grad_dtype": "e4m3", "fast_accumulation": "output_and_grad_input"}
AUTO_LINEAR = {"recipe": "delayed", **AUTO_GEMMS}
BLOCKWISE = {"recipe": "blockwise", "grad_dtype": "e4m3", "fast_accumulation": "none"}
REFERENCE = {"recipe": "delayed", "grad_dtype": "e4m3", "backend": "reference"}


def of(block: dict[str, Any], facts: Facts = UNKNOWN) -> dict[str, Any]:
    """The keys of a block with these facts that have another value than without a preset."""
    before = copy.deepcopy(block)
    config = Fp8Config.from_block({"enabled": True, **block}, facts)
    assert block == before
    return config.model_dump(mode="json", exclude_defaults=True, exclude={"enabled", "preset"})


def test_one_key_is_auto_and_ends_in_bf16_where_the_steps_are_known() -> None:
    common = {"linear": AUTO_LINEAR, "activations": {"fused": True}, "guard": {"action": "bf16"}}
    assert of({}, KNOWN) == {**common, "schedule": {"bf16_last_fraction": 0.03, "total_steps": 1000}}
    assert of({}, UNKNOWN) == of({}, Facts(MIN_STEPS - 1, ENDS)) == {**common, "schedule": {"layers": IN_BF16}}
    assert of({}, Facts("auto", ENDS)) == {**common, "schedule": {"bf16_last_fraction": 0.03}}
    assert of({}, Facts()) == common
    assert of({"preset": "auto"}, KNOWN) == of({}, KNOWN)


def test_each_preset_has_what_it_is_for() -> None:
    fast = of({"preset": "fast"}, Facts(1000, ENDS, has_fa3=True))
    assert fast == of({}, KNOWN) | {
        "optimizer": {"states": "fp8", "master": "e4m11"},
        "attention": {"backend": "fa3"},
    }
    assert "attention" not in of({"preset": "fast"}, KNOWN)
    assert of({"preset": "precise"}, KNOWN) == of({}, UNKNOWN)
    serve = of({"preset": "serve"}, KNOWN)
    both = of({"preset": "precise", "schedule": {"bf16_last_fraction": 0.1}}, KNOWN)["schedule"]
    assert both == {"layers": IN_BF16, "bf16_last_fraction": 0.1, "total_steps": 1000}
    assert serve["linear"] == {**AUTO_LINEAR, "weight_scales": "power_of_two"} and "schedule" not in serve
    assert of({"preset": None}, KNOWN) == {}


def test_a_head_of_another_name_stays_in_bf16_unless_the_key_is_written() -> None:
    facts = Facts(1000, ENDS, head="rwkv.head.")
    for preset in PRESETS:
        assert of({"preset": preset}, facts)["linear"]["filter_fqns"] == ["lm_head", "rwkv.head."]
    assert of({"linear": {"filter_fqns": ["x"]}}, facts)["linear"]["filter_fqns"] == ["x"]
    both = of({}, Facts(1000, ENDS, is_parallel=True, head="rwkv.head."))["linear"]["filter_fqns"]
    assert both == ["lm_head", "rwkv.head.", *ENDS]


def test_tensor_parallel_layers_keep_their_precision() -> None:
    parallel = of({}, Facts(1000, ENDS, is_parallel=True))
    assert "schedule" not in parallel and parallel["guard"] == {"action": "report"}
    assert parallel["linear"] == {**AUTO_LINEAR, "filter_fqns": ["lm_head", *ENDS]}
    assert of({"linear": {"filter_fqns": ["x"]}}, Facts(None, ENDS, is_parallel=True))["linear"]["filter_fqns"] == ["x"]


@pytest.mark.parametrize(
    ("block", "facts", "section", "expected"),
    [
        ({"linear": {"recipe": "tensorwise"}}, KNOWN, "linear", AUTO_GEMMS),
        ({"linear": {"recipe": "blockwise"}}, KNOWN, "linear", BLOCKWISE),
        ({"linear": {"backend": "reference"}}, KNOWN, "linear", REFERENCE),
        ({"guard": {"action": None}}, KNOWN, "guard", {}),
        ({"activations": {"fused": False}}, KNOWN, "activations", {}),
        ({"schedule": {"bf16_last_fraction": 0.0}}, KNOWN, "schedule", {}),
        (
            {"schedule": {"bf16_last_fraction": 0.1}},
            KNOWN,
            "schedule",
            {"bf16_last_fraction": 0.1, "total_steps": 1000},
        ),
        ({"schedule": {"total_steps": 50}}, UNKNOWN, "schedule", {"bf16_last_fraction": 0.03, "total_steps": 50}),
        ({"schedule": {"total_steps": 10}}, KNOWN, "schedule", {"layers": IN_BF16, "total_steps": 10}),
        ({"schedule": {"layers": {"up": "bf16"}}}, UNKNOWN, "schedule", {"layers": {"up": "bf16"}}),
        ({"preset": "fast", "optimizer": {"states": "fp32"}}, KNOWN, "optimizer", {}),
        (
            {"preset": "fast", "optimizer": {"master": "e4m19"}},
            KNOWN,
            "optimizer",
            {"states": "fp8", "master": "e4m19"},
        ),
        (
            {"preset": "serve", "linear": {"weight_scales": "float"}},
            KNOWN,
            "linear",
            {**AUTO_LINEAR, "weight_scales": "float"},
        ),
    ],
)
def test_a_key_that_is_written_overrides_its_preset(
    block: dict[str, Any], facts: Facts, section: str, expected: dict[str, Any]
) -> None:
    assert of(block, facts).get(section, {}) == expected


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_preset_goes_with_every_recipe(preset: str, recipe: str, backend: str) -> None:
    for facts in (KNOWN, UNKNOWN, Facts(1000, ENDS, is_parallel=True, has_fa3=True)):
        linear = Fp8Config.from_block(
            {"enabled": True, "preset": preset, "linear": {"recipe": recipe, "backend": backend}}, facts
        ).linear
        assert (linear.recipe, linear.backend) == (recipe, backend)


def test_what_a_preset_comes_to_can_be_written_and_is_the_same_then() -> None:
    for preset in (*PRESETS, None):
        config = Fp8Config.from_block({"enabled": True, "preset": preset}, KNOWN)
        assert Fp8Config.from_block(config.model_dump(mode="json")) == config


def test_a_block_that_is_off_or_wrong_is_left_as_it_is() -> None:
    assert Fp8Config.from_block({"enabled": False}, KNOWN).linear.recipe == "tensorwise"
    with pytest.raises(ConfigError, match=r'^fp8\.preset: expected .*"serve" or null, got "fats"'):
        Fp8Config.from_block({"enabled": True, "preset": "fats"})
    with pytest.raises(ConfigError, match=r"^fp8\.schedule\.total_steps: .*bf16_last_fraction"):
        from fp8_ds.config.schedule import check_total

        check_total(Fp8Config.from_block({"enabled": True, "schedule": {"bf16_last_fraction": 0.1}}).schedule, None)
