"""plan: what a schedule leaves in FP8, and what DeepSpeed cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app

pytest.importorskip("transformers")

STOCK: dict[str, Any] = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL = [word for key, value in SHAPE.items() for word in ("--set", f"{key}={value}")]
SMALL += ["--set", "num_key_value_heads=2", "--set", "vocab_size=100"]
MLP = 64 * 128


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """plan(schedule, **more): its exit code, JSON and text, with this "schedule" and these keys of DeepSpeed's."""

    def run(schedule: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({**STOCK, **more, "fp8": {"enabled": True, "schedule": schedule}}))
        command = ["plan", "llama-8b", "--config", str(path), "--world", "2", *SMALL]
        result = CliRunner().invoke(app, [*command, "--json"])
        return result.exit_code, json.loads(result.stdout), CliRunner().invoke(app, command).stdout

    return run


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_the_schedule_keeps_in_bf16_is_not_called_fp8(plan: Any, stage: int) -> None:
    _, whole, _ = plan({}, zero_optimization={"stage": stage})
    layers = {"mlp.down_proj": "bf16", "layers.0.": "fp8"}  # of both, the longer counts
    code, found, text = plan({"layers": layers}, zero_optimization={"stage": stage})
    assert code == 0 and (whole["num_fp8"], found["num_fp8"]) == (21, 18)
    by_name = {row["fqn"]: row for row in found["layers"]}
    for number in range(3):
        row = by_name[f"model.layers.{number}.mlp.down_proj"]
        assert (row["in_fp8"], row["reason"]) == (False, "fp8.schedule, in all steps")
    assert found["fp8_percent_of_flops"] < whole["fp8_percent_of_flops"]
    # Stages 1 and 2 gather a layer's FP8 bytes beside its bf16.
    more = found["gathered_bytes_per_pass"] - whole["gathered_bytes_per_pass"]
    assert more == 3 * MLP * (2 if stage == 2 else 1)
    assert "down_proj (3) │ Linear │ [64, 128] │ bf16" in " ".join(text.split())


def test_a_schedule_of_no_step_in_fp8_leaves_no_layer_in_fp8(plan: Any) -> None:
    never = {"bf16_until_step": 60, "bf16_last_fraction": 0.5, "total_steps": 100}
    code, found, _ = plan(never)
    assert code == 1 and found["num_fp8"] == 0 and not found["schedule_varies"]
    numel = found["parameters"]
    assert found["gathered_bytes_per_pass"] == 2 * numel  # nothing is gathered in FP8 then
    code, found, _ = plan({**never, "layers": {"up_proj": "fp8"}})
    assert code == 0 and found["num_fp8"] == 3


def test_layers_that_are_too_small_to_gain_are_named_with_the_filter_that_leaves_them_in_bf16(tmp_path: Path) -> None:
    """They stay in FP8; the filter that is printed leaves all of them in bf16, and no other."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes = {**shape, "num_hidden_layers": 1, "vocab_size": 100}
    words = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    path = tmp_path / "ds.json"

    def run(linear: dict[str, Any], *more: str) -> Any:
        path.write_text(json.dumps({**STOCK, "fp8": {"enabled": True, "linear": linear}}))
        return CliRunner().invoke(app, ["plan", "llama-8b", "--config", str(path), *words, *more]).stdout

    found = json.loads(run({}, "--json"))
    small = [f"model.layers.0.self_attn.{name}_proj" for name in "kv"]  # 512 x 2048
    assert found["num_fp8"] == 7 and sorted(found["small_layers"]) == small
    filters = found["filter_fqns_without_small_layers"]
    assert json.dumps(filters) in " ".join(run({}).split())
    again = json.loads(run({"filter_fqns": filters}, "--json"))
    assert again["num_fp8"] == 5 and again["small_layers"] == []
    assert {row["fqn"] for row in again["layers"] if not row["in_fp8"]} == {*small, "lm_head"}


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_attention_that_the_model_does_not_take_is_refused_on_any_machine(tmp_path: Path, command: str) -> None:
    """What a start would say of GPT-2, whose attention has dropout; not that there is no Hopper GPU here."""
    path = tmp_path / "ds.json"
    block = {"enabled": True, "attention": {"backend": "fa3_fp8", "hadamard": True}}
    path.write_text(json.dumps({**STOCK, "fp8": block}))

    def run(model: str, *words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [command, model, "--config", str(path), "--json", *words])
        return result.exit_code, json.loads(result.stdout).get("error", "")

    code, error = run("gpt2")
    assert code == 2 and error.startswith("fp8.attention.backend: expected null with dropout in attention")
    small = ["--set", "n_layer=1", "--set", "attn_pdrop=0"]
    assert run("gpt2", *small) == (0, "")
    code, error = run("gpt2", *small, "--set", "n_embd=96", "--set", "n_head=2")
    assert code == 2 and error.startswith("fp8.attention.hadamard: head dim: expected a power of two")
