import subprocess
import sys
from typing import Any

import pytest

from fp8_ds.config import Fp8Config, OptimizerConfig
from fp8_ds.config.explain import REMOVED
from fp8_ds.errors import ConfigError


def test_a_sink_is_a_string_or_a_list_of_them() -> None:
    for sink, sinks in (("deepspeed", ("deepspeed",)), (["deepspeed", "a.jsonl"], ("deepspeed", "a.jsonl"))):
        config = Fp8Config.from_block({"enabled": True, "monitor": {"every": 1, "sink": sink}})
        assert config.monitor.sinks == sinks
        assert config.to_state()["monitor"]["sink"] == sink  # as JSON has it


@pytest.mark.parametrize(
    ("block", "master"),
    [
        ({}, "fp32"),
        ({"states": "fp8"}, "e4m19"),
        ({"master": None}, "fp32"),
        ({"states": "fp32", "master": "fp32"}, "fp32"),
    ],
)
def test_fp8_states_alone_imply_the_wider_split_master(block: dict[str, Any], master: str) -> None:
    config = Fp8Config.from_block({"enabled": True, "optimizer": block})
    assert config.optimizer.master_format == master
    assert config.to_state()["optimizer"]["master_format"] == master


def on(**linear: Any) -> dict[str, Any]:
    return {"enabled": True, "linear": linear}


# What is wrong: the block, and the key by which the message starts.
ERRORS: dict[str, tuple[Any, str]] = {
    "block is a bool": (True, "fp8:"),
    "enabled missing": ({}, "fp8.enabled:"),
    "enabled is a string": ({"enabled": "true"}, "fp8.enabled:"),
    "enabled is auto": ({"enabled": "auto"}, "fp8.enabled:"),
    "typo in a block": ({"enabled": True, "linaer": {}}, "fp8.linaer:"),
    "key one level too high": ({"enabled": True, "recipe": "delayed"}, "fp8.recipe:"),
    "a key that is gone": ({"enabled": True, "zero": {"keep_bf16_shard": False}}, "fp8.zero.keep_bf16_shard:"),
    "fp32 masters beside FP8 states": (
        {"enabled": True, "optimizer": {"states": "fp8", "master": "fp32"}},
        "fp8.optimizer.master:",
    ),
    "a split master without FP8 states": ({"enabled": True, "optimizer": {"master": "e4m19"}}, "fp8.optimizer.master:"),
    "typo in a value": (on(recipe="tensorwize"), "fp8.linear.recipe:"),
    "a block that is a list": ({"enabled": True, "zero": []}, "fp8.zero:"),
    "filter is a string": (on(filter_fqns="output"), "fp8.linear.filter_fqns:"),
    "filter holds a number": (on(filter_fqns=["a", 3]), "fp8.linear.filter_fqns.1:"),
    "ZeRO's stage": ({"enabled": True, "zero": {"stage": 3}}, "fp8.zero.stage:"),
    "an integer with an exponent": ({"enabled": True, "optimizer": {"seed": 1e8}}, "fp8.optimizer.seed:"),
    "a format that blocks have no GEMM for": (on(recipe="blockwise", grad_dtype="e5m2"), "fp8.linear.grad_dtype:"),
    "fast sums of a product in bf16": (
        on(recipe="rowwise_with_gw_hp", fast_accumulation="all"),
        "fp8.linear.fast_accumulation:",
    ),
    "fast sums in float32": (
        on(backend="reference", fast_accumulation="output_and_grad_input"),
        "fp8.linear.fast_accumulation:",
    ),
    "scales of blocks that are no powers of two": (
        on(recipe="blockwise", weight_scales="float"),
        "fp8.linear.weight_scales:",
    ),
    "scales of split masters that are no powers of two": (
        {"enabled": True, "linear": {"weight_scales": "float"}, "optimizer": {"states": "fp8"}},
        "fp8.linear.weight_scales:",
    ),
    "fast sums of blocks": (on(recipe="blockwise", fast_accumulation="output"), "fp8.linear.fast_accumulation:"),
    "a rotation of what is not rounded": (
        {"enabled": True, "attention": {"backend": "fa3", "hadamard": True}},
        "fp8.attention.hadamard:",
    ),
    "a sink without a name": ({"enabled": True, "monitor": {"every": 1, "sink": ["a", ""]}}, "fp8.monitor.sink:"),
    "a fraction above one": (
        {"enabled": True, "schedule": {"bf16_last_fraction": 10}},
        "fp8.schedule.bf16_last_fraction:",
    ),
    "a layer's precision that is none": (
        {"enabled": True, "schedule": {"layers": {"layers.0": "int8"}}},
        "fp8.schedule.layers.layers.0:",
    ),
    "layers of an empty name": ({"enabled": True, "schedule": {"layers": {"": "bf16"}}}, "fp8.schedule.layers:"),
    "a sink twice": (
        {"enabled": True, "monitor": {"every": 1, "sink": ["a.jsonl", "deepspeed", "a.jsonl"]}},
        "fp8.monitor.sink:",
    ),
    "a sink for nothing": ({"enabled": True, "monitor": {"sink": "health.jsonl"}}, "fp8.monitor.sink:"),
    "layers as a list of names": ({"enabled": True, "schedule": {"layers": ["layers.0."]}}, "fp8.schedule.layers:"),
    "an empty filter": (on(filter_fqns=[""]), "fp8.linear.filter_fqns.0:"),
    "a comment": ({"enabled": True, "//": "FP8"}, "fp8.//:"),
    "a key of Transformer Engine's": (on(margin=0), "fp8.linear.margin:"),
    "a block that is null": ({"enabled": True, "zero": None}, "fp8.zero:"),
    "a block that is its main value": ({"enabled": True, "optimizer": "fp8"}, "fp8.optimizer:"),
    "thousands of brackets": (on(fast_accumulation="[" * 100_000), "fp8.linear.fast_accumulation:"),
}


@pytest.mark.parametrize(("block", "key"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_block_is_refused_by_its_key(block: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fp8Config.from_block(block)
    assert str(caught.value).startswith(key) and ", got " in str(caught.value)


@pytest.mark.parametrize(("name", "remedy"), REMOVED.items())
def test_what_is_gone_is_refused_with_what_to_do_instead(name: str, remedy: str) -> None:
    key, has_value, value = name.partition("=")
    _, block, leaf = key.split(".")
    known = Fp8Config.keys()
    assert (key in known) == bool(has_value)
    with pytest.raises(ConfigError) as caught:
        Fp8Config.from_block({"enabled": True, block: {leaf: value or "auto"}})
    assert str(caught.value).startswith(f"{key}: expected ") and remedy in str(caught.value)


def test_one_error_names_every_wrong_key() -> None:
    with pytest.raises(ConfigError, match=r"(?s)^3 errors.*fp8.enabled:.*fp8.linear.recipe:.*fp8.zero.shard:"):
        Fp8Config.from_block({"enabled": "yes", "linear": {"recipe": "auto"}, "zero": {"shard": 1}})


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_in_fp8_below_stage_2_are_refused(stage: int) -> None:
    config = Fp8Config.from_block({"enabled": True, "zero": {"reduce_scatter": "fp8"}})
    for other in (2, 3):
        config.validate_with({"zero_optimization": {"stage": other}})
    below = {"zero_optimization": {"stage": stage}}
    Fp8Config(enabled=True).validate_with(below)
    with pytest.raises(ConfigError, match=rf"^fp8\.zero\.reduce_scatter: .*stage {stage}"):
        config.validate_with(below)


def test_a_model_built_directly_is_checked_as_one_from_a_file() -> None:
    with pytest.raises(ValueError, match=r"fp8\.optimizer\.release: "):
        OptimizerConfig(release=True)
    with pytest.raises(ValueError, match=r"fp8\.activations\.nonlinear: "):
        Fp8Config(enabled=True, preset=None, activations={"nonlinear": "fp8"})  # type: ignore[arg-type]


def test_json_that_python_cannot_hold_or_print_is_refused_by_name() -> None:
    """What a file may have: an integer above every float, a depth above the interpreter's, half of a character."""
    huge = {"enabled": True, "schedule": {"bf16_last_fraction": 10**400}}
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for block, key in (
        (huge, "fp8.schedule.bf16_last_fraction: expected a number"),
        ({"enabled": True, "deep": deep}, "fp8.deep: expected a known key, got what is nested too deep"),
        ({"enabled": True, "\ud800": 1}, 'fp8: expected whole characters, got "\\ud800"'),
    ):
        with pytest.raises(ConfigError) as caught:
            Fp8Config.from_block(block)
        assert str(caught.value).startswith(key), str(caught.value)[:200]
        str(caught.value).encode()
    while deep:  # freed level by level: at once it would be freed by recursion
        deep = deep.pop("a")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Fp8Config(enabled=True).enabled = False  # type: ignore[misc]


def test_checking_a_block_needs_neither_torch_nor_deepspeed() -> None:
    # fp8_ds/__init__ is the library's door and may import more; the config module must not.
    code = (
        "import importlib.util, sys, types; spec = importlib.util.find_spec('fp8_ds');"
        "package = types.ModuleType('fp8_ds'); package.__path__ = spec.submodule_search_locations;"
        "sys.modules['fp8_ds'] = package; import fp8_ds.config;"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
