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
    "syntax_a8.py": "import fp8_ds x\n",
    "divides_a8.py": "1 / 0\n",
    "good.csv": "step,loss\n1,2.0\n2,1.0\n",
    "word.csv": "step,loss\n1,abc\n2,3\n",
    "zero.csv": "step,loss\n1,0\n2,0\n",
    "binary.csv": b"\xff\xfe\x00\x00",
    "list.jsonl": "[1, 2]\n3\n",
    "trainer_state.json": '{"log_history": 3}',
    "half.jsonl": '{"step": 1, "loss": 3.0}\n{"step": 2, "lo',
    "deep.jsonl": "[" * 100_000,
    "large.csv": "step,loss\n1,1e308\n2,1e308\n",
}
NO_CURVES = ("word.csv", "binary.csv", "list.jsonl", "half.jsonl", "deep.jsonl", "trainer_state.json")
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
        ((*PLAN, "--set", "num_hidden_layers=abc"), 2, "configuration"),
        ((*PLAN, "--set", "num_hidden_layer=1"), 2, "got 'num_hidden_layer'. Did you mean num_hidden_layers?"),
        ((*PLAN, "--set", "=1"), 2, "--set: "),
        ((*PLAN, "--set", "vocab_size=0"), 2, "model: "),
        ((*PLAN[:1], "ours_a8:number", *PLAN[2:]), 2, "got int"),
        ((*PLAN[:1], "ours_a8:missing", *PLAN[2:]), 2, "ours_a8:missing"),
        ((*PLAN[:1], "ours_a8:number", *PLAN[2:], "--set", "a=1"), 2, "--set: "),
        ((*PLAN[:1], "lacks_a8:f", *PLAN[2:]), 2, "no_such_module_a8"),
        ((*PLAN[:1], "llama-9b", *PLAN[2:]), 2, "llama-9b"),
        ((*PLAN[:1], "gone.json", *PLAN[2:]), 3, "MODEL: "),
        ((*PLAN[:1], "gpt2", *PLAN[2:], "--seq", 1025), 2, "--seq: "),
        (("plan", "gpt2", "--config", "gone.json"), 3, "--config: "),
        (("plan", "gpt2", "--config", "comment.json"), 2, "line 2 column 3"),
        (("plan", "gpt2", "--config", "twice.json"), 2, '"enabled" twice'),
        (("plan", "llama-8b"), 2, "--config"),
        ((*ESTIMATE, "ours_a8:other_forward"), 4, "ValueError"),
        ((*ESTIMATE, "llama-8b", "--memory", -5), 2, "--memory"),
        (("estimate", "llama-8b", "--config", "types.json"), 2, "data_types: "),
        (("compare", "good.csv", "fp8=gone"), 3, "RUNS: "),
        (("compare", "good.csv,", "good.csv"), 2, "RUNS: "),
        *((("compare", "good.csv", name), 2, f"{name}: ") for name in NO_CURVES),
        (("compare", "large.csv", "good.csv"), 2, "large.csv: expected a base with finite losses"),
        (("compare", "zero.csv", "good.csv"), 2, "zero.csv: expected a base whose mean loss is above 0"),
        (("doctor", "--no-probe", "--config", "ds.json", "--script", "gone.py"), 3, "--script: "),
        (("doctor", "--no-probe", "--script", "ours_a8.py"), 2, "--script: "),
        ((), 2, "command"),
        (("no-such-command",), 2, "no-such-command"),
        (("heatmap", "health.jsonl", "o.png"), 2, "heatmap: "),
    ],
)
def test_every_error_has_its_message_and_its_exit_code(arguments: tuple[object, ...], code: int, words: str) -> None:
    pytest.importorskip("transformers")
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == code and list(found) == ["error"] and words in found["error"]
    assert ("Traceback" in result.stderr) == (code == 4)
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == set(FILES)


@pytest.mark.parametrize("command", [PLAN[:1], ESTIMATE[:1]])
@pytest.mark.parametrize(
    ("model", "raised"),
    [
        ("ours_a8:raises", "RuntimeError: kaputt"),
        ("ours_a8:reads", ""),
        ("ours_a8:needs", "TypeError: needs() missing 1"),
        ("ours_a8:ends", "SystemExit: 2"),
        ("parses_a8:make", "SystemExit: 2"),
        ("divides_a8:make", "ZeroDivisionError: division "),
        ("syntax_a8:make", "SyntaxError: invalid syntax"),
    ],
)
def test_an_error_of_the_users_own_model_is_named_as_that_and_not_as_a_defect(
    command: tuple[str], model: str, raised: str
) -> None:
    result = CliRunner().invoke(app, [*command, model, "--config", "ds.json", "--json"])
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and error.startswith("MODEL: expected ") and f"got {raised}" in error
    assert "report a defect" not in error and ("Traceback" in result.stderr or "SystemExit" in raised)


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
