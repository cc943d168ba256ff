import json
import subprocess
import sys
from typing import Any

import pytest

from fp8_ds.config import Fp8Config, OptimizerConfig
from fp8_ds.config.explain import REMOVED
from fp8_ds.errors import ConfigError


def test_enabled_alone_is_the_pinned_setting() -> None:
    assert Fp8Config.from_block({"enabled": True}).model_dump() == {
        "enabled": True,
        "linear": {
            "recipe": "tensorwise",
            "grad_dtype": "e5m2",
            "fast_accumulation": "output",
            "backend": "torch",
            "filter_fqns": ("lm_head",),
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 0,
            "frozen": "bf16",
        },
        "zero": {"reduce_scatter": "bf16"},
        "optimizer": {
            "states": "fp32",
            "master": None,
            "release": False,
            "release_clipping": "exact",
            "seed": 0,
        },
        "activations": {
            "fused": False,
            "nonlinear": "bf16",
            "cross_entropy_chunk_mem_const": None,
        },
        "tensor_parallel": {"gather": "fp8"},
        "attention": {"backend": None, "hadamard": False},
        "schedule": {
            "bf16_until_step": 0,
            "bf16_last_fraction": 0.0,
            "total_steps": None,
            "layers": {},
        },
        "guard": {"action": None},
        "monitor": {"every": 0, "sink": "deepspeed"},
        "without_deepspeed_fixes": (),
    }


def test_a_full_block_of_json_is_accepted() -> None:
    text = """{"enabled": false, "linear": {"recipe": "delayed", "grad_dtype": "e4m3", "backend": "reference",
               "filter_fqns": ["lm_head", "layers.0."], "frozen": "fp8"},
               "zero": {"reduce_scatter": "fp8"},
               "optimizer": {"states": "fp8", "master": "e4m11", "release": true, "release_clipping": "delayed_norm",
                             "seed": 4294967295},
               "activations": {"fused": true, "nonlinear": "fp8", "cross_entropy_chunk_mem_const": 8},
               "tensor_parallel": {"gather": "bf16"},
               "attention": {"backend": "fa3_fp8", "hadamard": true},
               "schedule": {"bf16_until_step": 100, "bf16_last_fraction": 0.1,
                            "total_steps": 1000, "layers": {"layers.0.": "bf16"}},
               "guard": {"action": "bf16"},
               "monitor": {"every": 50, "sink": "runs/health.jsonl"}}"""
    config = Fp8Config.from_block(json.loads(text))
    assert config.enabled is False
    assert config.linear.filter_fqns == ("lm_head", "layers.0.")
    assert config.linear.frozen == "fp8"
    assert config.zero.reduce_scatter == "fp8"
    assert (config.optimizer.states, config.optimizer.master, config.optimizer.release) == ("fp8", "e4m11", True)
    assert (config.activations.fused, config.activations.nonlinear) == (True, "fp8")
    assert config.activations.cross_entropy_chunk_mem_const == 8
    assert config.tensor_parallel.gather == "bf16"
    assert (config.schedule.bf16_last_fraction, config.schedule.layers) == (0.1, {"layers.0.": "bf16"})
    assert (config.monitor.every, config.monitor.sink) == (50, "runs/health.jsonl")


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


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_a_split_master_without_fp8_states_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match=rf'^fp8\.optimizer\.master: .*got "{master}"\. .*set "states": "fp8"'):
        Fp8Config.from_block({"enabled": True, "optimizer": {"master": master}})


def test_an_empty_filter_converts_the_head_too() -> None:
    assert Fp8Config.from_block({"enabled": True, "linear": {"filter_fqns": []}}).linear.filter_fqns == ()


def on(**linear: Any) -> dict[str, Any]:
    return {"enabled": True, "linear": linear}


# block, the key the message must start with, and what else it must say (the value, the remedy)
ERRORS: dict[str, tuple[Any, str, list[str]]] = {
    "block is a bool": (True, "fp8:", ["got true", '"fp8": {"enabled": true}']),
    "block is auto": ("auto", "fp8:", ['got "auto". Write "fp8": {"enabled": true}']),
    "block is null": (None, "fp8:", ["got null"]),
    "block is a list": ([], "fp8:", ["got []"]),
    "enabled missing": ({}, "fp8.enabled:", ["got nothing", '"enabled": true']),
    "enabled is a string": (
        {"enabled": "true"},
        "fp8.enabled:",
        ['got "true"', "true or false", "Write true without quotes"],
    ),
    "enabled as Python writes it": ({"enabled": "False"}, "fp8.enabled:", ["Write false without quotes"]),
    "enabled is another string": ({"enabled": "yes"}, "fp8.enabled:", ['got "yes". Write true or false.']),
    "enabled is null": ({"enabled": None}, "fp8.enabled:", ["got null. Write true or false."]),
    "null is a string": (
        {"enabled": True, "schedule": {"total_steps": "null"}},
        "fp8.schedule.total_steps:",
        ["Write null without quotes"],
    ),
    "an integer is a string": (
        {"enabled": True, "monitor": {"every": "100"}},
        "fp8.monitor.every:",
        ['got "100". Write 100 without quotes'],
    ),
    "a number is a string": (
        {"enabled": True, "schedule": {"bf16_last_fraction": "0.1"}},
        "fp8.schedule.bf16_last_fraction:",
        ['got "0.1". Write 0.1 without quotes'],
    ),
    "no number is a string": (
        {"enabled": True, "monitor": {"every": "often"}},
        "fp8.monitor.every:",
        ["Remove the key for the default, 0."],
    ),
    "the block is a string": ("true", "fp8:", ['Write "fp8": {"enabled": true}, or']),
    "enabled is a number": ({"enabled": 1}, "fp8.enabled:", ["got 1", "true or false"]),
    "enabled is auto": ({"enabled": "auto"}, "fp8.enabled:", ['"auto" is not supported', "write true or false"]),
    "typo in a block": ({"enabled": True, "linaer": {}}, "fp8.linaer:", ["Did you mean fp8.linear?"]),
    "typo in a key": (on(recipie="tensorwise"), "fp8.linear.recipie:", ["Did you mean fp8.linear.recipe?"]),
    "key one level too high": ({"enabled": True, "recipe": "delayed"}, "fp8.recipe:", ["fp8.linear.recipe?"]),
    "key in the wrong block": (on(hadamard=True), "fp8.linear.hadamard:", ["fp8.attention.hadamard?"]),
    "nothing close": ({"enabled": True, "zero": {"qqq": 1}}, "fp8.zero.qqq:", ["got 1", "fp8.zero.reduce_scatter"]),
    "a key that is gone": (
        {"enabled": True, "zero": {"keep_bf16_shard": False}},
        "fp8.zero.keep_bf16_shard:",
        ["got false", "Remove the key", "GatheredParameters"],
    ),
    "fp32 masters beside FP8 states": (
        {"enabled": True, "optimizer": {"states": "fp8", "master": "fp32"}},
        "fp8.optimizer.master:",
        [
            'expected "e4m19" or "e4m11" with states "fp8", got "fp32"',
            '"e4m19", the default then, loads a checkpoint with fp32 masters',
        ],
    ),
    "buckets that are gone": (
        {"enabled": True, "optimizer": {"outstanding_update_bytes": 1 << 26}},
        "fp8.optimizer.outstanding_update_bytes:",
        ["got 67108864", "Remove the key", "reduce_bucket_size"],
    ),
    "a clipping that is gone": (
        {"enabled": True, "optimizer": {"states": "fp8", "release": True, "release_clipping": "per_tensor"}},
        "fp8.optimizer.release_clipping:",
        ['expected "exact" or "delayed_norm", got "per_tensor"', "by the global norm of the step before"],
    ),
    "states that would become fp32": (
        {"enabled": True, "schedule": {"fp32_states_from_step": 100}},
        "fp8.schedule.fp32_states_from_step:",
        ["got 100", "Remove the key", 'with "optimizer": {"states": "fp32"}'],
    ),
    "typo in a value": (on(recipe="tensorwize"), "fp8.linear.recipe:", ['Did you mean "tensorwise"?', '"delayed"']),
    "upper case": (on(grad_dtype="E5M2"), "fp8.linear.grad_dtype:", ['Did you mean "e5m2"?']),
    "unlike any value": (on(grad_dtype="int8"), "fp8.linear.grad_dtype:", ['got "int8"', '"e5m2" or "e4m3"']),
    "a value that is auto": (on(recipe="auto"), "fp8.linear.recipe:", ['"auto" is not supported']),
    "a block that is auto": ({"enabled": True, "linear": "auto"}, "fp8.linear:", ['"auto" is not supported']),
    "a block that is a list": ({"enabled": True, "zero": []}, "fp8.zero:", ["an object of keys", "got []"]),
    "a foreign format": (
        {"enabled": True, "zero": {"reduce_scatter": "e5m2"}},
        "fp8.zero.reduce_scatter:",
        ['got "e5m2"', '"bf16" or "fp8"'],
    ),
    "bool as a string": (
        {"enabled": True, "attention": {"hadamard": "false"}},
        "fp8.attention.hadamard:",
        ["Write false without"],
    ),
    "filter is a string": (
        on(filter_fqns="output"),
        "fp8.linear.filter_fqns:",
        ['list of strings, got "output". Write ["output"].'],
    ),
    "filter has commas": (
        on(filter_fqns="lm_head, layers.0."),
        "fp8.linear.filter_fqns:",
        ['Write ["lm_head", "layers.0."].'],
    ),
    "filter is empty": (on(filter_fqns=""), "fp8.linear.filter_fqns:", ["Remove the key for the default"]),
    "filter is auto": (on(filter_fqns="auto"), "fp8.linear.filter_fqns:", ['"auto" is not supported']),
    "filter holds a number": (on(filter_fqns=["a", 3]), "fp8.linear.filter_fqns.1:", ["a string", "got 3"]),
    "filter holds nothing": (on(filter_fqns=[""]), "fp8.linear.filter_fqns.0:", ["at least one character"]),
    "a key in capitals": (on(RECIPE="rowwise"), "fp8.linear.RECIPE:", ["Did you mean fp8.linear.recipe?"]),
    "a key with hyphens": (
        {"enabled": True, "monitor-every": 1, "schedule": {"total-steps": 9}},
        "2 errors",
        ["Did you mean fp8.schedule.total_steps?"],
    ),
    "a key like none but for its block": (
        {"enabled": True, "optimizer": {"opt_steps": 3}},
        "fp8.optimizer.opt_steps:",
        ["Known here: fp8.optimizer.states,"],
    ),
    "a key like no other": (
        {"enabled": True, "typo": 1},
        "fp8.typo:",
        ["Known here: fp8.enabled, "],
    ),
    "a comment": (on(_comment="x"), "fp8.linear._comment:", ['The block takes no comments: put it beside "fp8"']),
    "ZeRO's stage": ({"enabled": True, "zero": {"stage": 3}}, "fp8.zero.stage:", ['belongs in "zero_optimization"']),
    "DeepSpeed's optimizer": (
        {"enabled": True, "optimizer": {"type": "AdamW"}},
        "fp8.optimizer.type:",
        ['belongs in DeepSpeed\'s "optimizer", beside the block'],
    ),
    "a key of MS-AMP": ({"enabled": True, "opt_level": "O2"}, "fp8.opt_level:", ["MS-AMP's: docs/migrating.md"]),
    "a key of Transformer Engine": (on(margin=0), "fp8.linear.margin:", ["Transformer Engine's: docs/migrating.md"]),
    "a recipe in its block's place": (
        {"enabled": True, "linear": "rowwise"},
        "fp8.linear:",
        ['expected an object of keys, got "rowwise". Write {"recipe": "rowwise"}.'],
    ),
    "states in their block's place": ({"enabled": True, "optimizer": "fp8"}, "fp8.optimizer:", ['{"states": "fp8"}']),
    "true in a block's place": (
        {"enabled": True, "activations": True},
        "fp8.activations:",
        ["Its keys: fused, nonlinear, cross_entropy_chunk_mem_const."],
    ),
    "null in a block's place": ({"enabled": True, "guard": None}, "fp8.guard:", ["Remove the key for the defaults."]),
    "layers in a list": (
        {"enabled": True, "schedule": {"layers": ["layers.0.", "head"]}},
        "fp8.schedule.layers:",
        ['expected an object of "bf16" or "fp8" by name', 'Write {"layers.0.": "bf16", "head": "bf16"}.'],
    ),
    "an integer with an exponent": (
        {"enabled": True, "optimizer": {"seed": 1e8}},
        "fp8.optimizer.seed:",
        ["expected an integer, got 100000000.0. Write 100000000:"],
    ),
    "a format as torch names it": (on(grad_dtype="float8_e4m3fn"), "fp8.linear.grad_dtype:", ['Did you mean "e4m3"?']),
    "a backend of no name": (on(backend="te"), "fp8.linear.backend:", ['"torch" or "reference", got "te"']),
    "a master of no format": (
        {"enabled": True, "optimizer": {"master": "e4m20"}},
        "fp8.optimizer.master:",
        ['got "e4m20"', '"e4m19", "e4m11" or null'],
    ),
    "a moment's format as states": (
        {"enabled": True, "optimizer": {"states": "e4m3"}},
        "fp8.optimizer.states:",
        ['"fp32" or "fp8"'],
    ),
    "Liger's loss by our key": (
        {"enabled": True, "activations": {"cross_entropy": "liger"}},
        "fp8.activations.cross_entropy:",
        ["which this version has no more", 'got "liger"', "apply_liger_kernel_to_llama(model=model"],
    ),
    "chunks of no size": (
        {"enabled": True, "activations": {"cross_entropy_chunk_mem_const": 0}},
        "fp8.activations.cross_entropy_chunk_mem_const:",
        ["an integer of at least 1, got 0"],
    ),
    "a format that blocks have no GEMM for": (
        on(recipe="blockwise", grad_dtype="e5m2"),
        "fp8.linear.grad_dtype:",
        ['expected "e4m3" with recipe "blockwise", got "e5m2"', "remove the key"],
    ),
    "fast sums of blocks, which have none": (
        on(recipe="blockwise", fast_accumulation="output"),
        "fp8.linear.fast_accumulation:",
        ['expected "none" with recipe "blockwise", got "output"', "remove the key"],
    ),
    "fast sums of a product in bf16": (
        on(recipe="rowwise_with_gw_hp", fast_accumulation="all"),
        "fp8.linear.fast_accumulation:",
        ['expected "output_and_grad_input" at most with recipe "rowwise_with_gw_hp", got "all"', "in bf16"],
    ),
    "fast sums in float32": (
        on(backend="reference", fast_accumulation="output_and_grad_input"),
        "fp8.linear.fast_accumulation:",
        ['expected "none" or "output" with backend "reference", got "output_and_grad_input"', '"backend": "torch"'],
    ),
    "a fraction above one": (
        {"enabled": True, "schedule": {"bf16_last_fraction": 10}},
        "fp8.schedule.bf16_last_fraction:",
        ["a number of at most 1", "got 10"],
    ),
    "steps before the first": (
        {"enabled": True, "schedule": {"bf16_until_step": -1}},
        "fp8.schedule.bf16_until_step:",
        ["an integer of at least 0, got -1"],
    ),
    "a layer's precision that is none": (
        {"enabled": True, "schedule": {"layers": {"layers.0": "int8"}}},
        "fp8.schedule.layers.layers.0:",
        ['"bf16" or "fp8", got "int8"'],
    ),
    "layers of an empty name": (
        {"enabled": True, "schedule": {"layers": {"": "bf16"}}},
        "fp8.schedule.layers:",
        ['a string of at least one character, got "". An empty string is part of every name: name layers'],
    ),
    "a sink of an empty name": (
        {"enabled": True, "monitor": {"every": 1, "sink": ""}},
        "fp8.monitor.sink:",
        ['a string of at least one character, got "". Remove the key for the default, "deepspeed".'],
    ),
    "a sink that is a number": (
        {"enabled": True, "monitor": {"every": 1, "sink": 3}},
        "fp8.monitor.sink:",
        ['expected a string or a list of strings, got 3. Remove the key for the default, "deepspeed".'],
    ),
    "sinks that are none": (
        {"enabled": True, "monitor": {"every": 1, "sink": []}},
        "fp8.monitor.sink:",
        ["expected a string or a list of strings, got []"],
    ),
    "sinks of which one is a number": (
        {"enabled": True, "monitor": {"every": 1, "sink": ["deepspeed", 3]}},
        "fp8.monitor.sink:",
        ['expected a string or a list of strings, got ["deepspeed", 3]'],
    ),
    "sinks of which one has no name": (
        {"enabled": True, "monitor": {"every": 1, "sink": ["deepspeed", ""]}},
        "fp8.monitor.sink:",
        ["a string of at least one character"],
    ),
    "a sink twice": (
        {"enabled": True, "monitor": {"every": 1, "sink": ["a.jsonl", "deepspeed", "a.jsonl"]}},
        "fp8.monitor.sink:",
        ['expected each sink once, got "a.jsonl" 2 times. Leave one.'],
    ),
    "sinks for nothing": (
        {"enabled": True, "monitor": {"sink": ["deepspeed", "health.jsonl"]}},
        "fp8.monitor.sink:",
        ['expected "deepspeed" with every 0, got ["deepspeed", "health.jsonl"]'],
    ),
    "a total without a fraction": (
        {"enabled": True, "schedule": {"total_steps": 10}},
        "fp8.schedule.total_steps:",
        ["expected null with bf16_last_fraction 0, got 10"],
    ),
    "a sink for nothing": (
        {"enabled": True, "monitor": {"sink": "health.jsonl"}},
        "fp8.monitor.sink:",
        ['expected "deepspeed" with every 0, got "health.jsonl"', '"every": 100'],
    ),
    "a value that is a list": (on(recipe=["tensorwise"]), "fp8.linear.recipe:", ['got ["tensorwise"]']),
    "thousands of brackets": (on(fast_accumulation="[" * 100_000), "fp8.linear.fast_accumulation:", ["[["]),
}


@pytest.mark.parametrize(("block", "key", "fragments"), ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_key_the_value_and_the_remedy(block: Any, key: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Fp8Config.from_block(block)
    message = str(caught.value)
    assert message.startswith(key)
    assert ", got " in message
    for fragment in fragments:
        assert fragment in message


def test_a_seed_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'^fp8\.optimizer\.seed: expected 0 with states "fp32", got 3'):
        Fp8Config.from_block({"enabled": True, "optimizer": {"seed": 3}})
    with pytest.raises(ConfigError, match=r"seed: expected an integer of at least 0, got -1"):
        Fp8Config.from_block({"enabled": True, "optimizer": {"states": "fp8", "seed": -1}})


def test_inputs_kept_in_fp8_without_fused_modules_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'^fp8\.activations\.nonlinear: .*fused false, got "fp8"\. .*set "fused": true'
    ):
        Fp8Config.from_block({"enabled": True, "activations": {"nonlinear": "fp8"}})


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
    with pytest.raises(ConfigError) as caught:
        Fp8Config.from_block({"enabled": "yes", "linear": {"recipe": "auto"}, "zero": {"shard": 1}})
    message = str(caught.value)
    assert message.startswith("3 errors")
    for key in ("fp8.enabled:", "fp8.linear.recipe:", "fp8.zero.shard:"):
        assert key in message


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_in_fp8_below_stage_2_are_refused(stage: int) -> None:
    config = Fp8Config.from_block({"enabled": True, "zero": {"reduce_scatter": "fp8"}})
    for other in (2, 3):
        config.validate_with({"zero_optimization": {"stage": other}})
    below = {"zero_optimization": {"stage": stage}}
    Fp8Config(enabled=True).validate_with(below)
    with pytest.raises(ConfigError, match=rf'^fp8\.zero\.reduce_scatter: .*stage {stage}, got "fp8"\. .*use stage 2'):
        config.validate_with(below)


def test_a_model_built_directly_is_checked_as_one_from_a_file() -> None:
    with pytest.raises(ValueError, match=r'fp8\.optimizer\.release: expected false with states "fp32", got true'):
        OptimizerConfig(release=True)
    with pytest.raises(ValueError, match=r'fp8\.activations\.nonlinear: expected "bf16" with fused false'):
        Fp8Config(enabled=True, activations={"nonlinear": "fp8"})  # type: ignore[arg-type]


def test_contradictions_are_named_beside_unknown_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        Fp8Config.from_block({"enabled": True, "optimizer": {"release": True}, "linaer": {}})
    message = str(caught.value)
    assert message.startswith("2 errors") and "fp8.optimizer.release:" in message and "fp8.linaer:" in message


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


def test_an_integer_below_its_minimum_is_refused_with_the_minimum():
    with pytest.raises(ConfigError, match="seed: expected an integer of at least 0, got -1"):
        Fp8Config.from_block({"enabled": True, "optimizer": {"states": "fp8", "seed": -1}})
