"""Benchmark scripts run once on CPU at a tiny size and leave their numbers in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run_main(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu_environment: dict[str, str]
) -> Callable[..., str]:
    """run_main(name, *arguments): what the script prints; its workers are processes of their own."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.syspath_prepend(str(root / "benchmarks"))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        for key in ("PATH", "PYTHONPATH"):
            monkeypatch.setenv(key, cpu_environment[key])
        import_module(name).main()
        return capsys.readouterr().out

    return run


def written(folder: Path, pattern: str) -> Any:
    """The one result of the run, which names no folder of this machine."""
    (path,) = folder.glob(pattern)
    assert str(folder) not in path.read_text()
    return json.loads(path.read_text())


def test_end_to_end_gives_speed_and_losses(run_main: Callable[..., str], tmp_path: Path) -> None:
    arms = ("--reference", "torch-eager", "--arms", "ours-e4m11-eager")
    own = ("--steps", 40, "--cache", tmp_path / "text", "--out", tmp_path / "out")
    run_main("end_to_end", "--model", "tiny-llama", *arms, *own)
    (run,) = written(tmp_path / "out", "*-training.json")["runs"]
    plain, ours, second = run["results"]
    assert len(plain["losses"]) == 4 and plain["losses"][-1] < plain["losses"][0] - 0.2
    # The same weights and the same tokens: and the second run of bf16 has other weights.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.005)
    assert second["losses"][0] != plain["losses"][0] and ours["fp8"]["resident_weight_bytes"] > 0


def test_gather_measures_both_dtypes(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("gather", "--gpus", 2, "--scale", 4096, "--out", tmp_path)
    (run,) = written(tmp_path, "*-gather.json")
    layer = {name: row["bytes"] for name, row in run["layer"].items()}
    weights = 218_103_808 // 4096
    assert layer["fp8, one buffer"] == layer["fp8, ZeRO-3's own"] == weights
    assert layer["bf16, one buffer"] == layer["bf16, ZeRO-3's own"] == 2 * weights


def test_kernels_tune_calls_every_kernel(run_main: Callable[..., str]) -> None:
    pytest.importorskip("triton")
    assert " kernels called" in run_main("kernels_tune", "--dry-run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("attention", "--device cpu --lengths 32 --tokens 64 --dims 64 --accuracy-length 48 --accuracy-heads 2"),
        ("optimizer_step", "--layers 1 --hidden 128 --vocab 64 --steps 2 --arms torch_fused_AdamW_fp32"),
        ("parallel_layers", "--gpus 2 --shapes 8b --scale 64 --tokens 64 --layers 2 --arms ours ours-rowwise"),
    ],
)
def test_a_script_leaves_numbers(run_main: Callable[..., str], tmp_path: Path, name: str, arguments: str) -> None:
    run_main(name, *(word.replace("_", " ") for word in arguments.split()), "--out", tmp_path)
    assert written(tmp_path, "*.json*")
