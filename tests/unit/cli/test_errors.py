"""Whatever goes wrong: a message in one JSON object, and the exit code that docs/cli.md gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.tools.doctor import diagnosis

DS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "fp8": {"enabled": True},
}
MODEL = """
import torch

number = 3
def raises(): raise RuntimeError("kaputt")
def reads(): torch.ones(1).sum().item()
def needs(width, *more, height=3): return torch.nn.Linear(width, height)
made = torch.nn.Linear(64, 64)
def ends(): raise SystemExit(2)
def other_forward(): return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
"""
FILES: dict[str, str | bytes] = {
    "ds.json": json.dumps(DS),
    "types.json": json.dumps({**DS, "data_types": "x"}),
    "comment.json": '{\n  // FP8\n  "fp8": {"enabled": true}\n}',
    "twice.json": '{"fp8": {"enabled": true}, "bf16": {"enabled": true, "enabled": true}}',
    "ours_a8.py": MODEL,
    "parses_a8.py": "import argparse\nargparse.ArgumentParser().parse_args(['--steps'])\n",
    "lacks_a8.py": "import no_such_module_a8\n",
    "syntax.py": "import fp8_ds x\n",
    "good.csv": "step,loss\n1,2.0\n2,1.0\n",
    "copy.csv": "step,loss\n1,2.0\n2,1.0\n",
    "word.csv": "step,loss\n1,abc\n2,3\n",
    "step.csv": "step,loss\nx,1\n2,3\n",
    "ragged.csv": "step,loss\n1,2,3,4\n",
    "zero.csv": "step,loss\n1,0\n2,0\n",
    "binary.csv": b"\xff\xfe\x00\x00",
    "list.jsonl": "[1, 2]\n3\n",
    "null.jsonl": '{"step": 1, "loss": 3.0}\n{"step": null, "loss": 2}\n',
    "x.tfevents.1": b"\x05" + b"\x00" * 11 + b"\xff" * 9,
    "trainer_state.json": '{"log_history": 3}',
    "short.txt": "a few words " * 10,
    "fp8_ds_autoload.pth": b"\xff\xfe\x00",
    "half.jsonl": '{"step": 1, "loss": 3.0}\n{"step": 2, "lo',
    "deep.json": "[" * 100_000,
    "deep.jsonl": "[" * 100_000,
    "digits.jsonl": '{"text": ' + "1" * 10_000 + "}",
    "large.csv": "step,loss\n1,1e308\n2,1e308\n",
}
PATHS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
PLAN = ("plan", "llama-8b", "--config", "ds.json")
ESTIMATE = ("estimate", "--config", "ds.json", "--seq", 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ours_a8", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((*PLAN, "--set", "num_hidden_layers=abc"), 2, "expected the configuration of a causal language model"),
        ((*PLAN, "--set", "num_hidden_layer=1"), 2, "got 'num_hidden_layer'. Did you mean num_hidden_layers?"),
        ((*PLAN, "--set", "xyzzy=1"), 2, "got 'xyzzy'. Its class in transformers has no such key."),
        ((*PLAN, "--set", "=1"), 2, "--set: expected key=value, got '=1'"),
        ((*PLAN, "--set", "model_type=nothing"), 2, "expected the configuration of a causal language model"),
        ((*ESTIMATE, "llama-8b", "--set", "n_layers=1"), 2, "--set: expected a key of llama-8b's configuration"),
        ((*PLAN, "--set", "vocab_size=0"), 2, "model: expected sizes above 0 in the configuration of llama-8b"),
        ((*PLAN, "--set", "hidden_size=4095"), 2, "expected the configuration of a causal language model"),
        (("plan", "ours_a8:number", "--config", "ds.json"), 2, "expected a function at ours_a8:number, got int"),
        (("plan", "ours_a8:number", "--config", "ds.json", "--set", "a=1"), 2, "--set: expected a model with a config"),
        (
            ("plan", "ours_a8:made", "--config", "ds.json"),
            2,
            "a function at ours_a8:made, got an nn.Module, Linear. Name",
        ),
        (
            ("plan", "lacks_a8:f", "--config", "ds.json"),
            2,
            "got No module named 'no_such_module_a8'. lacks_a8 needs it",
        ),
        (("plan", "gone_a8.x:f", "--config", "ds.json"), 2, "got No module named 'gone_a8'. Start in the folder of"),
        (("plan", "gpt2", "--config", "comment.json"), 2, "line 2 column 3 (char 4) in comment.json: '// FP8'. Name a"),
        (("plan", "gpt2", "--config", "twice.json"), 2, 'got "enabled" twice in one object in twice.json. Name'),
        (("plan", ":f", "--config", "ds.json"), 2, "expected a config.json"),
        (("plan", "ours_a8:", "--config", "ds.json"), 2, "expected a config.json"),
        ((*ESTIMATE, "ours_a8:other_forward"), 4, "got ValueError: input: expected"),
        (("estimate", "llama-8b", "--config", "types.json"), 2, 'data_types: expected what DeepSpeed reads, got "x"'),
        ((*ESTIMATE, "llama-8b", "--memory", -5), 2, "--memory"),
        ((*ESTIMATE, "llama-8b", "--memory", "inf"), 2, "--memory"),
        (("compare", "good.csv", "fp8=gone"), 3, "RUNS: expected a file or folder to work with, got 'No such file"),
        (("compare", "good.csv", "word.csv"), 2, "word.csv: expected steps and losses, got ValueError: could not"),
        (("compare", "good.csv", "step.csv"), 2, "step.csv: expected steps and losses, got ValueError: could not"),
        (("compare", "good.csv", "ragged.csv"), 2, "or with values that have no name. Repair"),
        (("compare", "good.csv", "binary.csv"), 2, "binary.csv: expected steps and losses, got Unicode"),
        (("compare", "good.csv", "x.tfevents.1"), 2, 'expected a column with "loss" in its name, got no rows'),
        (("compare", "good.csv", "list.jsonl"), 2, "list.jsonl: expected steps and losses, got ValueError: [1, 2] w"),
        (("compare", "good.csv", "null.jsonl"), 2, "null.jsonl: expected steps and losses, got TypeError"),
        (("compare", "good.csv", "trainer_state.json"), 2, "expected steps and losses, got TypeError: 'int'"),
        (("compare", "good.csv", "half.jsonl"), 2, "Invalid control character at: line 2 column 16"),
        (("compare", "good.csv", "deep.jsonl"), 2, "deep.jsonl: expected steps and losses, got JSONDecodeError: Br"),
        (("compare", "large.csv", "good.csv"), 2, "large.csv: expected a base with finite losses, got inf in step 1"),
        (("compare", "good.csv", "b="), 2, "RUNS: expected [NAME=]PATH[,PATH...], got 'b='"),
        (("compare", "good.csv,", "good.csv"), 2, "RUNS: expected [NAME=]PATH[,PATH...], got 'good.csv,'"),
        (("compare", "zero.csv", "good.csv"), 2, "zero.csv: expected a base whose mean loss is above 0, got 0"),
        (("compare", "zero.csv,zero.csv", "good.csv,good.csv"), 2, "zero.csv: expected a run of its own"),
        (("plan", "gpt2", "--config", "ds.json", "--seq", 1025), 2, "--seq: expected at most 1024, the positions that"),
        (("estimate", "gpt2", "--config", "ds.json", "--seq", 1025), 2, "--seq: expected at most 1024"),
        (("plan", "deep.json", "--config", "ds.json"), 2, "model: expected JSON in deep.json, got Brackets nested"),
        (("plan", "gpt2", "--config", "deep.json"), 2, "got Brackets nested too deeply: line 1"),
        (("doctor", "--no-such-option"), 2, "--no-such-option"),
        (("--json", "doctor"), 2, "--json: expected it behind the command"),
        ((), 2, "Missing command"),
        (("plan", "llama-8b"), 2, "--config"),
        (("no-such-command",), 2, "no-such-command"),
        (("heatmap", "health.jsonl", "o.png"), 2, "heatmap: expected a command of this version, got one"),
        (("parity", "gpt2", "--data", "short.txt"), 2, "got one that is gone. Start examples/deepspeed/parity.py, or"),
        (("estimate", "llama-8b", "--config", "ds.json", "--world", "two"), 2, "--world"),
    ],
)
def test_every_error_has_its_message_and_its_exit_code(arguments: tuple[object, ...], code: int, words: str) -> None:
    pytest.importorskip("transformers")
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == code and list(found) == ["error"] and words in found["error"]
    assert ("Traceback" in result.stderr) == (code == 4)
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == set(FILES)


OF_THE_MODEL = [
    (command, model, words)
    for model, words in (
        ("ours_a8:raises", "expected ours_a8:raises to build its model on the meta device, got RuntimeError: kaputt. "),
        ("ours_a8:reads", "expected ours_a8:reads to build its model on the meta device, got "),
        (
            "ours_a8:needs",
            "expected ours_a8:needs to build its model on the meta device, got TypeError: needs() missing 1",
        ),
        ("broken_a8:make", "expected broken_a8 to be a module that can be imported, got ZeroDivisionError: division "),
        ("syntax:make", "expected syntax to be a module that can be imported, got SyntaxError: invalid syntax"),
    )
    for command in ("plan", "estimate")
]


@pytest.mark.parametrize(("command", "model", "words"), OF_THE_MODEL)
def test_an_error_of_the_users_own_model_is_named_as_that_and_not_as_a_defect(
    folder: Path, command: str, model: str, words: str
) -> None:
    (folder / "broken_a8.py").write_text("1 / 0\n")
    result = CliRunner().invoke(app, [command, model, "--config", "ds.json", "--json"])
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and error.startswith(f"MODEL: {words}")
    assert "standard error" in error and "report a defect" not in error and "Traceback" in result.stderr


@pytest.mark.parametrize("model", ["parses_a8:make", "ours_a8:ends"])
def test_a_model_that_ends_the_process_is_named_and_is_no_answer(model: str) -> None:
    result = CliRunner().invoke(app, ["plan", model, "--config", "ds.json", "--json"])
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and "got SystemExit: 2. It ends the process: put what a script does" in error


def test_a_key_is_not_taken_unseen_where_transformers_cannot_tell_which_there_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    class Demanding(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            raise KeyError("encoder")

    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "demanding", Demanding)
    command = ["plan", "demanding.json", "--config", "ds.json", "--json"]
    (folder / "demanding.json").write_text('{"model_type": "demanding"}')
    for more in ([], ["--set", "typo=1"]):
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 2 and "causal language model" in json.loads(result.stdout)["error"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(app, ["plan", "llama-8b", "--config", "ds.json", "--json", "--set", "typo=1"])
    assert result.exit_code == 2 and "expected transformers to be installed" in json.loads(result.stdout)["error"]


def test_an_error_that_nobody_foresaw_is_not_the_answer_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(diagnosis, "checks", fail)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 4 and not result.stdout
    assert "Traceback" in result.stderr and "fp8-ds: expected no error here, got ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_not_the_answer_no(more: list[str]) -> None:
    """A full disk, as of `fp8-ds doctor > answer`: only a process of its own has a standard output."""
    command = [sys.executable, "-m", "fp8_ds.cli.app", "autoload", "on", "--site-dir", ".", *more]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=PATHS, check=False)
    assert result.returncode == 3, result.stderr
    assert "fp8-ds: standard output: expected a file" in result.stderr and "Traceback" not in result.stderr


def test_help_is_help_with_json_too() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--help"])
    assert result.exit_code == 0 and "--no-probe" in result.stdout


def test_an_autoload_file_of_somebody_else_is_outdated(folder: Path) -> None:
    result = CliRunner().invoke(app, ["autoload", "status", "--site-dir", str(folder), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["autoload"] == "outdated"


def test_doctor_answers_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed", lambda package: None if package == "torch" else "1.0")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 1 and checks["torch"]["status"] == "missing" and "install" in checks["torch"]["remedy"]


def test_doctor_names_what_installs_each_package_that_a_command_or_hugging_face_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("transformers", "accelerate", "peft")
    installed = diagnosis.installed
    for version in (None, "1.0"):
        monkeypatch.setattr(diagnosis, "installed", lambda one, v=version: v if one in names else installed(one))
        checks = {check.name: check for check in diagnosis.checks()}
        assert {checks[name].status for name in names} == {"ok" if version else "optional"}
        assert all(version or ("pip install" in checks[name].remedy and name in checks[name].remedy) for name in names)
