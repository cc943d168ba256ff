"""Benchmark scripts that run once on CPU at a tiny size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

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


def test_end_to_end_gives_speed_and_losses(run_main: Callable[..., str], tmp_path: Path) -> None:
    arms = ("--reference", "torch-eager", "--arms", "ours-e4m11-eager")
    own = ("--steps", 40, "--cache", tmp_path / "text", "--out", tmp_path / "out")
    run_main("end_to_end", "--model", "tiny-llama", *arms, *own)
    (path,) = (tmp_path / "out").glob("*-training.json")
    assert str(tmp_path) not in path.read_text()
    (run,) = json.loads(path.read_text())["runs"]
    plain, ours, second = run["results"]
    assert len(plain["losses"]) == 4 and plain["losses"][-1] < plain["losses"][0] - 0.2
    # The same weights and the same tokens: and the second run of bf16 has other weights.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.005)
    assert second["losses"][0] != plain["losses"][0] and ours["fp8"]["resident_weight_bytes"] > 0


def test_kernels_tune_calls_every_kernel(run_main: Callable[..., str]) -> None:
    pytest.importorskip("triton")
    assert " kernels called" in run_main("kernels_tune", "--dry-run")


def test_linear_sizes_measures_each_cell_once(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("linear_sizes", "--out", tmp_path, "--budget", 0)
    assert not list(tmp_path.glob("*.json"))
    run_main("linear_sizes", "--out", tmp_path)
    (path,) = tmp_path.glob("*-linear-sizes.json")
    cells = json.loads(path.read_text())["cells"]
    assert {(cell["tokens"], cell["in"], cell["out"]) for cell in cells} == {
        (tokens, *features) for tokens in (32, 64) for features in ((32, 48), (48, 32))
    }
    for cell in cells:
        assert cell["gpu_us"].keys() == cell["eager_us"].keys() == {"bf16", "delayed", "tensorwise"}
        assert min(*cell["gpu_us"].values(), *cell["eager_us"].values(), cell["quantize_us"]) > 0
    path.write_text(json.dumps({"cells": cells[1:]}))
    run_main("linear_sizes", "--out", tmp_path)
    again = json.loads(path.read_text())["cells"]
    assert again[:3] == cells[1:] and len(again) == 4  # the missing one is measured, the others are kept
