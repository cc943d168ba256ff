"""DeepSpeed's own parser judges DeepSpeed's keys: its refusals keep its words, and name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.config.ds_config import parsed
from fp8_ds.engine import initialize as starting
from fp8_ds.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "fp8": {"enabled": True},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 5}, "tensor_parallel: expected what DeepSpeed reads, got 5. It says: TypeError"),
        ({"tensor_parallel": {"autotp_size": None}}, "tensor_parallel.autotp_size: expected what DeepSpeed reads, got"),
        ({"optimizer": "AdamW"}, 'optimizer: expected what DeepSpeed reads, got "AdamW"'),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer: expected what DeepSpeed reads"),
        ({"scheduler": 5}, "scheduler: expected what DeepSpeed reads, got 5"),
        ({"data_types": "x"}, 'data_types: expected what DeepSpeed reads, got "x"'),
        ({"bf16": True}, "bf16: expected what DeepSpeed reads, got true"),
        ({"bf16": {"enable": True}}, "bf16.enable: expected what DeepSpeed reads, got true. It says: Extra inputs"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge: expected what DeepSpeed reads, got 2. It says"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage: expected what DeepSpeed reads, got "two"'),
        ({"zero_optimization": {"stage": 3, "offload_param": {"quux": 1}}}, "zero_optimization.offload_param"),
        ({"zero_optimization": {"stage": 3, "leaf_module": ["a.B"]}}, "leaf_module configuration must be a mapping"),
        ({"train_micro_batch_size_per_gpu": "x"}, "train_micro_batch_size_per_gpu: expected what DeepSpeed reads, got"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: expected what DeepSpeed reads, got 0"),
        ({"train_micro_batch_size_per_gpu": None}, "train_batch_size or train_micro_batch_size_per_gpu needs to be"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected what DeepSpeed reads, got 8.5"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected what DeepSpeed reads, got 0"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0', a string"),
        ({"fp16": {"enabled": True}}, "bfloat16 and fp16 modes cannot be simultaneously enabled"),
    ],
)
def test_what_deepspeed_stops_at_is_named_with_its_own_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({**CONFIG, **changes})
    assert words in str(caught.value) and str(caught.value).endswith("Correct it.")


@pytest.mark.parametrize("key", ["amp", "elasticity"])
def test_a_key_that_the_installed_deepspeed_has_removed_is_refused_as_it_does(key: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig({"train_batch_size": 1, key: {}})
    except DeepSpeedConfigError as error:
        with pytest.raises(ConfigError, match=key) as caught:
            parsed({**CONFIG, key: {}})
        assert str(error) in str(caught.value)
    else:
        assert parsed({**CONFIG, key: {}})


@pytest.mark.parametrize(
    ("sizes", "ranks", "found"),
    [
        ({}, 8, (16, 2, 1)),
        ({"train_batch_size": 96}, 8, (96, 2, 6)),
        ({"train_batch_size": 96, "gradient_accumulation_steps": 3}, None, (96, 2, 3)),
        ({"train_micro_batch_size_per_gpu": "auto"}, 4, (4, 1, 1)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 4, (8, 2, 1)),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, 4, (8, 2, 1)),
        ({"tensor_parallel": {"autotp_size": 2}}, 8, (8, 2, 1)),
    ],
)
def test_batch_sizes_are_those_of_so_many_ranks(
    sizes: dict[str, Any], ranks: int | None, found: tuple[int, int, int]
) -> None:
    read = parsed({**CONFIG, **sizes}, ranks)
    assert found == (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 8),
        ({"train_batch_size": 7}, None),
        ({"train_batch_size": 20}, 7),
        ({"tensor_parallel": {"autotp_size": 2}}, 9),
    ],
)
def test_ranks_that_batch_sizes_do_not_fit_are_refused(changes: dict[str, Any], ranks: int | None) -> None:
    with pytest.raises(ConfigError, match=r"is not equal to micro_batch|are no multiple of tensor_parallel"):
        parsed({**CONFIG, **changes}, ranks)


def test_a_configuration_is_left_as_it_was() -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, "steps": {"a": [1]}}
    before = json.dumps(config)
    assert parsed(config).zero_config.stage == 3 and json.dumps(config) == before


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_plan_and_estimate_refuse_what_the_installed_deepspeed_stops_at(tmp_path: Path, command: str) -> None:
    pytest.importorskip("transformers")
    config = {**CONFIG, "zero_optimization": {"stage": 2, "reduce_buket_size": 1000}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    shape = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=1", "num_attention_heads=4")
    words = [word for setting in (*shape, "num_key_value_heads=2", "vocab_size=64") for word in ("--set", setting)]
    words = [command, "llama-8b", "--config", str(tmp_path / "ds.json"), "--seq", "16", *words, "--json"]
    found = CliRunner().invoke(app, words)
    said = "--config: DeepSpeed refuses it: zero_optimization.reduce_buket_size: expected what DeepSpeed reads"
    assert found.exit_code == 2 and json.loads(found.stdout)["error"].startswith(said)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("fp_8", 'Did you mean "fp8"?'),
        ("f8", 'Did you mean "fp8"?'),
        ("Float8", 'Did you mean "fp8"?'),
        ("msamp", 'It is MS-AMP\'s: write "fp8" in its place (docs/migrating.md).'),
        ("fp16", None),
        ("bf16", None),
        ("zero_optimisation", None),
    ],
)
def test_a_block_that_was_meant_as_fp8_is_named(key: str, remedy: str | None) -> None:
    said = f"{key}: expected a key that DeepSpeed reads, got one that it passes over in silence. {remedy}"
    assert starting.other_blocks({"bf16": {}, key: {}}) == ([said] if remedy else [])


@pytest.mark.parametrize(
    ("config", "rank", "said"),
    [
        ({"msamp": {"enabled": True}}, "0", ["msamp"]),
        ({"msamp": {"enabled": True}}, "1", []),
        ({"msamp": {"enabled": True}, "fp8": {"enabled": False}}, "0", []),
    ],
)
def test_a_run_without_fp8_says_that_another_librarys_block_does_nothing(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rank: str, said: list[str]
) -> None:
    from deepspeed.utils import logger

    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lines.append)
    monkeypatch.setenv("RANK", rank)
    starting._leave_to_deepspeed(config, {})
    assert [line.split(":")[0] for line in lines] == said
