"""A top-level key that DeepSpeed passes over is named, at a start and by the commands; all that it reads are known."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.engine import initialize as starting
from fp8_ds.engine.known_keys import KNOWN_KEYS, removed_key, unknown_keys, unread_key
from fp8_ds.judgement import judge

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "fp8": {"enabled": True},
}


class Recorded(dict[str, Any]):
    """Which keys are asked for, of itself and of copies of it."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # for `key in config.keys()`
        return self

    def __copy__(self) -> Recorded:
        return Recorded(self)


def test_every_key_that_the_installed_deepspeed_reads_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    Recorded.asked.clear()
    DeepSpeedConfig(Recorded(train_batch_size=1))
    assert len(Recorded.asked) > 50 and Recorded.asked - KNOWN_KEYS == set()


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("zero_optimisation", 'Did you mean "zero_optimization"?'),
        ("Zero_Optimization", 'Did you mean "zero_optimization"?'),
        ("micro_batch_size_per_gpu", 'Did you mean "train_micro_batch_size_per_gpu"?'),
        ("fp_8", 'Did you mean "fp8"?'),
        ("float8", 'Did you mean "fp8"?'),
        ("msamp", 'It is MS-AMP\'s: write "fp8" in its place (docs/migrating.md).'),
        ("corpus", "Correct it, or keep it for code of yours that reads it."),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(key: str, remedy: str) -> None:
    said = f"{key}: expected a key that DeepSpeed reads, got one that it passes over in silence. {remedy}"
    assert unknown_keys({**CONFIG, key: {}}) == [said]


def test_a_key_that_deepspeed_no_longer_supports_is_refused_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as theirs

    def reject(config: dict[str, Any]) -> None:
        if "amp" in config:
            raise theirs.DeepSpeedConfigError("Apex is gone.")

    monkeypatch.setattr(theirs, "_reject_removed_config_keys", reject, raising=False)
    found = judge({**CONFIG, "amp": {"enabled": True}})
    assert (found.on, found.reasons) == ("no", ("DeepSpeed refuses it at start: Apex is gone.",))
    assert judge(CONFIG).on != "no"
    monkeypatch.delattr(theirs, "_reject_removed_config_keys")  # as in 0.18.9
    assert removed_key({"amp": {}}) is None


def test_the_installed_deepspeed_is_asked_about_removed_keys() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    for key in ("amp", "elasticity", "mics_shard_size"):
        config = {"train_batch_size": 1, **({"zero_optimization": {key: 2}} if key.startswith("mics") else {key: {}})}
        try:
            DeepSpeedConfig(dict(config))
        except DeepSpeedConfigError as error:
            assert removed_key(config) == str(error)
        else:
            assert removed_key(config) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stge": 2}}, 'zero_optimization.stge: expected a key that .* Did you mean "stage"?'),
        (
            {"zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}},
            'zero_optimization.offload_optimiser: expected a key .* Did you mean "offload_optimizer"?',
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"quux": 1}}}, "offload_param.quux: .* Correct or remove"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e"}}, "reduce_bucket_size: expected what .* '5e'"),
        ({"bf16": {"enable": True}}, 'bf16.enable: expected a key that .* Did you mean "enabled"?'),
    ],
)
def test_what_deepspeed_stops_at_in_its_blocks_is_off(changes: dict[str, Any], message: str) -> None:
    """It starts no run in these, which would be called ON else."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    config = {**CONFIG, **changes}
    with pytest.raises(ValidationError):
        DeepSpeedConfig({key: value for key, value in config.items() if key != "fp8"} | {"train_batch_size": 1})
    found = judge(config)
    assert found.on == "no" and re.search(rf"DeepSpeed refuses it at start: .*{message}", found.reasons[0]), found


def test_a_value_that_deepspeed_stops_at_with_a_type_error_is_off() -> None:
    found = judge({**CONFIG, "zero_optimization": {"stage": 3, "leaf_module": ["a.B"]}})
    assert found.on == "no" and 'got {"stage": 3, "leaf_module": ["a.B"]}' in found.reasons[0], found
    assert "leaf_module configuration must be a mapping" in found.reasons[0]


def test_blocks_that_deepspeed_reads_are_left_to_it() -> None:
    automatic = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 5e7}
    for zero in (automatic, {"stage": 2, "leaf_module": {"classes": ["a.B"]}}, True):
        assert unread_key({"zero_optimization": zero, "bf16": {"enabled": True}}) is None


def test_comments_and_configurations_without_a_mistake_are_left_alone() -> None:
    assert unknown_keys({**CONFIG, "_comment": "for two hosts", "//": "", "#": ""}) == []


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_rank_0_says_it_at_a_start_before_anything_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, num_lines: int
) -> None:
    from deepspeed.utils import logger

    from fp8_ds.errors import UnsupportedError

    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lines.append)
    monkeypatch.setenv("RANK", rank)
    config = {**CONFIG, "optimizer": {"type": "AdamW"}, "zero_optimisation": {"stage": 2}}
    del config["zero_optimization"]
    with pytest.raises(UnsupportedError, match=r"zero_optimization\.stage: 0"):
        starting._accept(config, {"model": torch.nn.Linear(16, 16)})
    assert [line.split(":")[0] for line in lines] == ["zero_optimisation"] * num_lines


@pytest.mark.parametrize(
    ("config", "rank", "said"),
    [
        ({"msamp": {"enabled": True}}, "0", ["msamp"]),
        ({"msamp": {"enabled": True}}, "1", []),
        ({"msamp": {"enabled": True}, "fp8": {"enabled": False}}, "0", []),
        ({"zero_optimisation": {}}, "0", []),
    ],
)
def test_a_run_without_fp8_says_that_another_librarys_block_does_nothing(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rank: str, said: list[str]
) -> None:
    from deepspeed.utils import logger

    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lines.append)
    monkeypatch.setenv("RANK", rank)
    starting._leave_to_stock(config, {})
    assert [line.split(":")[0] for line in lines] == said
    assert all('write "fp8" in its place' in line for line in lines)


def test_doctor_says_it_whatever_the_answer_is() -> None:
    whole = {**CONFIG, "gradient_cliping": 1.0}
    for config in (whole, {**whole, "zero_optimization": {"stage": 0}}, {**whole, "fp8": {"enabled": False}}):
        assert judge(config).reasons[0].startswith("gradient_cliping: ")
        assert judge(config).reasons[1:] == judge({k: v for k, v in config.items() if k != "gradient_cliping"}).reasons


def asked(command: str, folder: Path) -> list[str]:
    """`plan` or `estimate`, of a small model and the ds.json in `folder`."""
    shape = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=1", "num_attention_heads=4")
    settings = [word for setting in (*shape, "num_key_value_heads=2", "vocab_size=64") for word in ("--set", setting)]
    return [command, "llama-8b", "--config", str(folder / "ds.json"), "--seq", "16", *settings, "--json"]


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_plan_and_estimate_say_it_beside_their_answer(tmp_path: Path, command: str) -> None:
    pytest.importorskip("transformers")
    words = asked(command, tmp_path)
    for key, code in (("zero_optimisation", 2), ("gradient_cliping", 0)):
        config = {**CONFIG, key: {}}
        if code:
            del config["zero_optimization"]
        (tmp_path / "ds.json").write_text(json.dumps(config))
        found = CliRunner().invoke(app, words)
        assert found.exit_code == code and ("error" in json.loads(found.stdout)) == bool(code)
        assert found.stderr.startswith(f"fp8-ds: {key}: expected a key that DeepSpeed reads")


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_plan_and_estimate_refuse_what_the_installed_deepspeed_stops_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pytest.importorskip("transformers")
    config = {**CONFIG, "zero_optimization": {"stage": 2, "reduce_buket_size": 1000}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = CliRunner().invoke(app, asked(command, tmp_path))
    said = "--config: DeepSpeed refuses it: zero_optimization.reduce_buket_size: expected a key that "
    assert found.exit_code == 2 and json.loads(found.stdout)["error"].startswith(said)
    assert json.loads(found.stdout)["error"].endswith('Did you mean "reduce_bucket_size"?')
    monkeypatch.setitem(sys.modules, "deepspeed.runtime", None)
    assert CliRunner().invoke(app, asked(command, tmp_path)).exit_code == 0  # without one they answer
