"""`fp8-ds parity` up to the start of its runs, which only write logs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8_ds.cli import parity as module
from fp8_ds.cli.app import app
from fp8_ds.parity.folder import held
from fp8_ds.parity.study import Study

pytest.importorskip("transformers")
SMALL = ["--set", "hidden_size=64", "--set", "intermediate_size=128", "--set", "num_hidden_layers=2"]
SMALL += ["--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=256"]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "fp8": {"enabled": True, "linear": {"recipe": "rowwise"}},
}

MODELS = """
import torch
def embedding(): return torch.nn.Embedding(256, 64)
def reads(): return torch.nn.Linear(64, int(torch.ones(64).sum()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text("some text, " * 500)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "bf16_at_the_end.json").write_text('{"enabled": true, "schedule": {"bf16_last_fraction": 0.1}}')
    (tmp_path / "nothing.json").write_text('{"enabled": true, "linear": {"filter_fqns": ["layers", "lm_head"]}}')
    (tmp_path / "off.json").write_text('{"enabled": false}')
    (tmp_path / "our_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "our_models", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The "fp8" blocks of the runs that were started; their loss is that of their names."""
    started: dict[str, Any] = {}

    def launch(study: Study, run: Any, seconds: float | None) -> tuple[int, str]:
        started[run.name] = study.arms[run.arm]
        loss = 2.0 + run.seed / 10 + (0.1 if run.arm == "e4m11" else 0.0)
        lines = "step,tokens,seconds,train_loss,held_out_loss", f"0,0,0,,{loss + 1}", f"20,640,1.0,{loss},{loss:.6f}"
        study.log(run).write_text("\n".join(lines) + "\n")
        return 0, ""

    monkeypatch.setattr(Study, "_launch", launch)
    return started


COMMON = ["--config", "ds.json", "--data", "text.txt", "--steps", "20", "--seq", "16", "--json"]


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["parity", "llama-8b", *COMMON, *SMALL, *map(str, arguments)])
    return result.exit_code, json.loads(result.stdout)


def test_bf16_and_the_configurations_own_block_are_compared(folder: Path, blocks: dict[str, Any]) -> None:
    code, found = run("--seeds", 2)
    assert code == 0 and found["left"] == [] and found["failures"] == {}
    assert [(one["run"], one["verdict"]) for one in found["results"]] == [("config", "parity")]
    assert blocks == {
        f"{name}-s{s}": block for s in (0, 1) for name, block in (("bf16", None), ("config", CONFIG["fp8"]))
    }
    assert sorted(path.suffix for path in (folder / "parity").glob("parity.*")) == [".csv", ".html", ".md", ".png"]


def test_arms_by_name_and_a_verdict_that_is_no(folder: Path, blocks: dict[str, Any]) -> None:
    code, found = run("--seeds", 2, "--arms", "bf16,default,e4m11", "--out", "other")
    assert code == 1
    assert [(one["run"], one["verdict"]) for one in found["results"]] == [("default", "parity"), ("e4m11", "worse")]
    assert blocks["default-s0"] == {"enabled": True}
    assert blocks["e4m11-s0"]["linear"] == {"recipe": "rowwise"}


def test_a_study_that_is_not_finished_is_no_parity(folder: Path, blocks: dict[str, Any]) -> None:
    code, found = run("--seeds", 1, "--minutes", 0)
    assert code == 1 and found["left"] == ["config-s0"] and found["results"] == []
    assert run("--seeds", 1)[1]["results"][0]["verdict"] == "undecided"  # one pair
    code, found = run("--seeds", 2)
    assert code == 0 and list(blocks) == ["bf16-s0", "config-s0", "bf16-s1", "config-s1"]


def test_an_interrupted_study_says_that_it_goes_on(
    folder: Path, blocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Study._launch

    def interrupted(study: Study, run: Any, seconds: float | None) -> tuple[int, str]:
        if run.arm == "bf16":
            return launch(study, run, seconds)
        raise KeyboardInterrupt

    words = ["parity", "llama-8b", *COMMON, *SMALL, "--seeds", "1"]
    monkeypatch.setattr(Study, "_launch", interrupted)
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, json.loads(result.stdout)) == (130, {"error": "interrupted"})
    assert "Interrupted. Runs that are done are kept in parity: the same command goes on." in result.stderr
    monkeypatch.setattr(Study, "_launch", launch)
    assert CliRunner().invoke(app, words).exit_code == 1 and list(blocks) == ["bf16-s0", "config-s0"]  # one pair


def test_two_calls_do_not_work_in_one_folder(folder: Path, blocks: dict[str, Any]) -> None:
    with held(folder / "parity"):
        code, found = run("--seeds", 1)
        assert code == 2 and found["error"].startswith("--out: expected a folder that no other call works in, got ")
        assert not blocks and run("--seeds", 1, "--out", "other")[0] == 1
    assert run("--seeds", 2)[0] == 0


def test_the_archive_goes_on_elsewhere(folder: Path, blocks: dict[str, Any]) -> None:
    run("--seeds", 1, "--minutes", 0, "--archive", "study.tar")
    run("--seeds", 1, "--out", "elsewhere", "--archive", "study.tar")
    assert list(blocks) == ["bf16-s0", "config-s0"]


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"optimizer": None}, (), 'expected an "optimizer" in it, got none. Add it, or name --lr'),
        ({"optimizer": None}, ("--lr", 0), "--lr: expected a number above 0, got 0.0"),
        (
            {"train_micro_batch_size_per_gpu": "auto"},
            (),
            'got "auto" for train_micro_batch_size_per_gpu. Write the number, or name --micro-batch.',
        ),
        ({"train_batch_size": 6}, ("--micro-batch", 4), "--config: train_batch_size: expected a multiple of 4"),
        ({"train_micro_batch_size_per_gpu": None}, (), "--config: expected train_batch_size or train_micro_batch"),
        ({"train_batch_size": 5}, (), "--config: train_batch_size: expected a multiple of 2"),
        ({"bf16": True}, (), "--config: bf16: expected an object, got true"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, (), 'got "auto" for optimizer.params.lr'),
        ({"zero_optimization": {"stage": 0}}, (), "zero_optimization.stage: 0"),
        ({}, ("--arms", "bf16,mine=bf16_at_the_end.json"), "fp8.schedule.total_steps"),
        ({}, ("--arms", "bf16"), "--arms: expected a base and another"),
        ({}, ("--arms", "bf16,fp9"), "--arms: expected some of bf16"),
        ({}, ("--arms", "config,bf16,config"), "--arms: expected each name once, got config again"),
        ({}, ("--pretrained",), "--pretrained: expected a folder with weights"),
        ({"train_micro_batch_size_per_gpu": 8}, (), "--held-out: expected at least 129 tokens, 8 windows of --seq 16"),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, (), "--held-out: expected at least 129 "),
        ({}, ("--gpus", 2), "--gpus: expected 1 without a GPU, got 2"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_run_starts(
    folder: Path, blocks: dict[str, Any], changes: dict[str, Any], more: tuple[object, ...], message: str
) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "ds.json").write_text(json.dumps(config))
    code, found = run(*more)
    assert code == 2 and message in found["error"] and not blocks


@pytest.mark.parametrize(
    ("model", "arms", "message"),
    [
        ("gpt2", "bf16,rowwise", "--arms rowwise: fp8: expected at least one linear to convert, got none of 49: "),
        ("gpt2", "bf16,config", "c_attn and 47 more (a Conv1D, which can be tensorwise or delayed)"),
        ("our_models:embedding", "bf16,e4m11", "--arms e4m11: fp8: expected at least one linear to convert, got none"),
        ("llama-8b", "bf16,default,mine=nothing.json", "--arms mine: fp8: expected at least one linear to convert"),
    ],
)
def test_a_model_without_a_layer_in_fp8_is_refused_before_a_run_starts(
    folder: Path, blocks: dict[str, Any], model: str, arms: str, message: str
) -> None:
    settings = SMALL if model == "llama-8b" else []
    result = CliRunner().invoke(app, ["parity", model, *COMMON, *settings, "--arms", arms])
    assert result.exit_code == 2 and message in json.loads(result.stdout)["error"] and not blocks
    assert not (folder / "parity").exists()


@pytest.mark.parametrize(
    ("model", "backend", "message"),
    [
        ("gpt2", "fa3_fp8_emulated", "--arms config: fp8.attention.backend: expected null with dropout in attention"),
        ("llama-8b", "fa3", "--arms config: fp8.attention.backend: FlashAttention-3: expected a Hopper GPU"),
    ],
)
def test_attention_that_a_start_refuses_is_refused_before_a_run_starts(
    folder: Path, blocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: str, backend: str, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    block = {"enabled": True, "attention": {"backend": backend}}
    (folder / "ds.json").write_text(json.dumps(CONFIG | {"fp8": block}))
    result = CliRunner().invoke(app, ["parity", model, *COMMON, *(SMALL if model == "llama-8b" else [])])
    assert result.exit_code == 2 and json.loads(result.stdout)["error"].startswith(message) and not blocks


def test_arms_without_fp8_need_no_layer_for_it(folder: Path, blocks: dict[str, Any]) -> None:
    words = ["parity", "our_models:embedding", *COMMON, "--seeds", "2", "--arms", "bf16,off=off.json"]
    assert CliRunner().invoke(app, words).exit_code == 0 and len(blocks) == 4


def test_a_function_that_needs_weights_is_run_all_the_same(folder: Path, blocks: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["parity", "our_models:reads", *COMMON, "--seeds", "2"])
    assert result.exit_code == 0 and len(blocks) == 4
    assert "fp8-ds: MODEL: expected our_models:reads to build its model on the meta device, got " in result.stderr


@pytest.mark.parametrize(("total", "is_said"), [(20, False), (1000, True), (None, False)])
def test_a_scheduler_with_another_number_of_steps_is_named(
    folder: Path, blocks: dict[str, Any], total: int | None, is_said: bool
) -> None:
    scheduler = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": total}}} if total else {}
    (folder / "ds.json").write_text(json.dumps(CONFIG | scheduler))
    result = CliRunner().invoke(app, ["parity", "llama-8b", *COMMON, *SMALL, "--seeds", "2"])
    assert result.exit_code == 0
    assert ("scheduler.params.total_num_steps: expected 20, as --steps, got 1000" in result.stderr) == is_said


def test_a_lock_that_runs_would_wait_for_is_named(
    folder: Path, blocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    lock = folder / "extensions/some_op/lock"
    for is_said in (False, True):
        result = CliRunner().invoke(app, ["parity", "llama-8b", *COMMON, *SMALL, "--seeds", "2"])
        assert result.exit_code == 0 and (f"rm {lock}." in result.stderr) == is_said
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()


def test_files_that_were_not_written_are_not_named(
    folder: Path, blocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["parity", "llama-8b", *COMMON, *SMALL, "--seeds", "2"]
    words.remove("--json")
    assert CliRunner().invoke(app, words).stdout.splitlines()[-1] == "parity/parity.md, .csv, .html, .png"
    monkeypatch.setattr(Study, "_launch", lambda *_: (1, "kaputt"))
    last = CliRunner().invoke(app, [*words, "--out", "failed"]).stdout.splitlines()[-1]
    assert last == "failed/parity.md, .csv"


def test_what_draws_the_curves_is_missed_before_the_runs(
    folder: Path, blocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    code, found = run()
    assert code == 2 and "pip install matplotlib" in found["error"] and not blocks


def test_a_missing_file_is_named_with_its_argument(folder: Path, blocks: dict[str, Any]) -> None:
    for more, argument in (
        (("--data", "gone.txt"), "--data"),
        (("--held-out", "gone.txt"), "--held-out"),
        (("--archive", "gone/study.tar"), "--archive"),
        (("--arms", "bf16,mine=gone.json"), "--arms"),
        (("--config", "gone.json"), "--config"),
    ):
        code, found = run(*more)
        assert (
            code == 3
            and found["error"].startswith(f"{argument}: expected a file or folder to work with, got ")
            and "gone" in found["error"]
        )
        assert not blocks


@pytest.mark.parametrize(
    ("option", "name"),
    [("--out", "text.txt"), ("--out", "text.txt/study"), ("--archive", "folder"), ("--held-out", "b")],
)
def test_what_cannot_be_written_or_read_is_named_with_its_argument(
    folder: Path, blocks: dict[str, Any], option: str, name: str
) -> None:
    for made in ("folder", "b", "parity"):  # the last is a study that has begun: no archive is unpacked into it
        (folder / made).mkdir()
    (folder / "b/binary.txt").write_bytes(b"\xff")
    code, found = run(option, name)
    assert (code, found["error"].split(":")[0]) == (2 if name == "b" else 3, option) and not blocks
