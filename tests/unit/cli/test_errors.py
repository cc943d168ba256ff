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
    "word.csv": "step,loss\n1,abc\n2,3\n",
    "zero.csv": "step,loss\n1,0\n2,0\n",
    "binary.csv": b"\xff\xfe\x00\x00",
    "list.jsonl": "[1, 2]\n3\n",
    "trainer_state.json": '{"log_history": 3}',
    "half.jsonl": '{"step": 1, "loss": 3.0}\n{"step": 2, "lo',
    "deep.json": "[" * 100_000,
    "deep.jsonl": "[" * 100_000,
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
        ((*PLAN, "--set", "=1"), 2, "--set: expected key=value, got '=1'"),
        ((*PLAN, "--set", "vocab_size=0"), 2, "model: expected sizes above 0 in the configuration of llama-8b"),
        (("plan", "ours_a8:number", "--config", "ds.json"), 2, "expected a function at ours_a8:number, got int"),
        (("plan", "ours_a8:number", "--config", "ds.json", "--set", "a=1"), 2, "--set: expected a model with a config"),
        (
            ("plan", "lacks_a8:f", "--config", "ds.json"),
            2,
            "got No module named 'no_such_module_a8'. lacks_a8 needs it",
        ),
        (("plan", "gpt2", "--config", "comment.json"), 2, "line 2 column 3 (char 4) in comment.json: '// FP8'. Name a"),
        (("plan", "gpt2", "--config", "twice.json"), 2, 'got "enabled" twice in one object in twice.json. Name'),
        ((*ESTIMATE, "ours_a8:other_forward"), 4, "got ValueError: input: expected"),
        (("estimate", "llama-8b", "--config", "types.json"), 2, 'data_types: expected what DeepSpeed reads, got "x"'),
        ((*ESTIMATE, "llama-8b", "--memory", -5), 2, "--memory"),
        (("compare", "good.csv", "fp8=gone"), 3, "RUNS: expected a file or folder to work with, got 'No such file"),
        (("compare", "good.csv", "word.csv"), 2, "word.csv: expected steps and losses, got ValueError: could not"),
        (("compare", "good.csv", "binary.csv"), 2, "binary.csv: expected steps and losses, got Unicode"),
        (("compare", "good.csv", "list.jsonl"), 2, "list.jsonl: expected steps and losses, got ValueError: [1, 2] w"),
        (("compare", "good.csv", "trainer_state.json"), 2, "expected steps and losses, got TypeError: 'int'"),
        (("compare", "good.csv", "half.jsonl"), 2, "Invalid control character at: line 2 column 16"),
        (("compare", "good.csv", "deep.jsonl"), 2, "deep.jsonl: expected steps and losses, got JSONDecodeError: Br"),
        (("compare", "large.csv", "good.csv"), 2, "large.csv: expected a base with finite losses, got inf in step 1"),
        (("compare", "good.csv,", "good.csv"), 2, "RUNS: expected [NAME=]PATH[,PATH...], got 'good.csv,'"),
        (("compare", "zero.csv", "good.csv"), 2, "zero.csv: expected a base whose mean loss is above 0, got 0"),
        (("plan", "gpt2", "--config", "ds.json", "--seq", 1025), 2, "--seq: expected at most 1024, the positions that"),
        (("estimate", "gpt2", "--config", "ds.json", "--seq", 1025), 2, "--seq: expected at most 1024"),
        (("doctor", "--no-such-option"), 2, "--no-such-option"),
        ((), 2, "Missing command"),
        (("plan", "llama-8b"), 2, "--config"),
        (("no-such-command",), 2, "no-such-command"),
        (("heatmap", "health.jsonl", "o.png"), 2, "heatmap: expected a command of this version, got one"),
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


def test_doctor_answers_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed", lambda package: None if package == "torch" else "1.0")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 1 and checks["torch"]["status"] == "missing" and "install" in checks["torch"]["remedy"]
