"""`fp8-ds parity` on a tiny model, from the text to the verdict: one pair, and, slow, several in pieces."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
MODEL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def study(tmp_path: Path, root: Path, cpu_environment: dict[str, str]) -> Any:
    """study(*options): exit code and JSON of the command on a Llama in the folder `model`."""
    from transformers import LlamaConfig

    LlamaConfig(**MODEL).save_pretrained(tmp_path / "model")
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config |= {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "steps_per_print": 1_000_000}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))

    def run(*options: object) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "fp8_ds.cli.app", "parity", "model", "--config", "ds.json", "--json"]
        command += ["--data", str(root / "docs"), "--seq", "32", *map(str, options)]
        done = subprocess.run(
            command, stdout=-1, stderr=-1, text=True, env=cpu_environment, cwd=tmp_path, timeout=500, check=False
        )
        assert done.stdout, done.stderr[-4000:]
        return done.returncode, json.loads(done.stdout)

    return run


def test_the_command_for_hugging_face_users_trains_and_compares_a_pair(
    root: Path, tmp_path: Path, cpu_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the quick start, word by word; its model, its text and the study are smaller."""
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    for key, value in cpu_environment.items():
        monkeypatch.setenv(key, value)

    page = (root / "docs/quickstart-huggingface.md").read_text()
    (command,) = re.findall(r"^fp8-ds (parity .*)$", page, re.MULTILINE)
    LlamaConfig(**MODEL).save_pretrained(tmp_path / "out")
    (tmp_path / "examples").symlink_to(root / "examples")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/text.md").write_text((root / "docs/config.md").read_text()[:30_000])
    done = CliRunner().invoke(app, [*shlex.split(command), "--steps", "10", "--seeds", "1", "--json"])
    assert done.exit_code == 1, done.output  # one pair is undecided
    assert "filled in as Trainer does by default: gradient_accumulation_steps 1, " in done.stderr
    found = json.loads(done.stdout)
    assert found["left"] == [] and found["failures"] == {}
    assert [(one["run"], one["verdict"]) for one in found["results"]] == [("config", "undecided")]
    runs = tmp_path / "parity/runs"
    plans = {name: json.loads((runs / f"{name}.json").read_text())["plan"] for name in ("bf16-s0", "config-s0")}
    assert plans["bf16-s0"] is None and plans["config-s0"].startswith("fp8: 14 of 15 linears")
    stock, fp8 = ([float(row[3]) for row in lines(runs / f"{name}.csv")[1:] if row[3]] for name in plans)
    assert stock[-1] < stock[0] and stock != fp8 and abs(stock[-1] - fp8[-1]) < 0.1 * (stock[0] - stock[-1])


def lines(path: Path) -> list[list[str]]:
    """All but the seconds."""
    return [[cell for k, cell in enumerate(line.split(",")) if k != 2] for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairs_are_trained_compared_and_cut_runs_gone_on_with(study: Any, tmp_path: Path) -> None:
    options = ("--steps", 30, "--seeds", 2, "--arms", "bf16,default,e4m11")
    code, found = study(*options, "--out", "whole")
    assert code in (0, 1) and found["left"] == [] and found["failures"] == {}
    assert [one["run"] for one in found["results"]] == ["default", "e4m11"]
    assert all(abs(one["percent"]) < 2 for one in found["results"])
    runs = tmp_path / "whole/runs"
    losses = {path.stem: lines(path) for path in runs.glob("*.csv")}
    assert all(float(rows[-1][3]) < float(rows[1][3]) - 0.5 for rows in losses.values())
    plans = {path.stem: json.loads(path.read_text())["plan"] for path in runs.glob("*.json")}
    assert [name for name, plan in sorted(plans.items()) if plan] == [
        "default-s0",
        "default-s1",
        "e4m11-s0",
        "e4m11-s1",
    ]
    in_bf16 = json.loads((runs / "default-s0.json").read_text())["held_out_loss_bf16"]
    at_end, begin = (float(losses["default-s0"][row][3]) for row in (-1, 1))
    assert in_bf16 != at_end and abs(in_bf16 - at_end) < 0.1 * (begin - at_end)
    assert "e4m11: " in (tmp_path / "whole/parity.md").read_text().split("computed in bf16")[1]
    # Pairs start alike up to FP8's rounding, and seeds do not.
    first = {name: float(rows[1][3]) for name, rows in losses.items()}
    assert abs(first["bf16-s0"] - first["default-s0"]) < abs(first["bf16-s0"] - first["bf16-s1"])

    for _ in range(3):  # each call cuts the run at its first look at the clock
        code, found = study(*options, "--out", "cut", "--minutes", 0)
        assert code == 1 and found["left"][0] == "bf16-s0"
    study("--steps", 30, "--seeds", 1, "--arms", "bf16,default", "--out", "cut")
    assert lines(tmp_path / "cut/runs/bf16-s0.csv") == losses["bf16-s0"]
    assert lines(tmp_path / "cut/runs/default-s0.csv") == losses["default-s0"]


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.timeout(900)
def test_two_ranks_under_the_launcher_go_on_from_a_cut(
    study: Any, tmp_path: Path, root: Path, cpu_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself refuses two ranks without GPUs, so that its worker is started here as it would."""
    from fp8_ds.parity.study import Run, Settings, Study
    from fp8_ds.parity.text import prepare

    tokens = prepare(tmp_path / "st/text", [root / "docs"], [], None, 256, 2)
    config = json.loads((tmp_path / "ds.json").read_text()) | {"zero_optimization": {"stage": 3}}
    values = {"settings": (), "pretrained": False, "steps": 20, "seq": 32, "gpus": 2, "compile": False}
    settings = Settings(model=str(tmp_path / "model"), config=config, digest=tokens.digest, **values)
    for key, value in cpu_environment.items():
        monkeypatch.setenv(key, value)
    found = Study(
        tmp_path / "st", settings, {"bf16": None, "e4m11": {"enabled": True, "optimizer": {"states": "fp8"}}}, [0]
    )
    run = Run("e4m11", 0)
    code, output = found._launch(run, 0.0)
    assert code == 0 and not found.log(run).exists(), output[-3000:]
    code, output = found._launch(run, None)
    assert code == 0, output[-3000:]
    rows = lines(found.log(run))
    assert rows[-1][:2] == ["20", str(20 * 2 * 2 * 4 * 32)] and float(rows[-1][3]) < float(rows[1][3])
    assert json.loads(found.log(run).with_suffix(".json").read_text())["world"] == 2
