"""The benchmark scripts of the FP8 optimizer states, on CPU at a tiny size: they run, and their verdicts can be bad."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import HANG

# --- optimizer_step.py ---


def test_optimizer_bench_has_the_two_billion_parameters_of_the_table(bench: Any) -> None:
    shapes = list(bench("optimizer_step").llama_parameters(8, 4096, 32000))
    total = sum(math.prod(shape) for _, shape in shapes)
    linear = sum(math.prod(shape) for kind, shape in shapes if kind == "linear")
    assert total == 8 * (218_103_808 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert linear == 8 * 218_103_808


@pytest.mark.slow
def test_optimizer_bench_measures_an_arm_in_its_own_process(run_main: Callable[..., str], tmp_path: Path) -> None:
    tiny = ("--layers", 1, "--hidden", 128, "--vocab", 64, "--steps", 2, "--out", tmp_path)
    tiny = (*tiny, "--arm-timeout", HANG)
    output = run_main("optimizer_step", *tiny, "--arms", "torch fused AdamW fp32")
    (lines,) = tmp_path.glob("*.jsonl")
    result = json.loads(lines.read_text())
    assert result["parameters"] == 4 * 128 * 128 + 3 * 448 * 128 + 2 * 64 * 128 + 3 * 128
    assert result["moved_weights"] and result["finite"] and result["ms"] > 0
    assert "| torch fused AdamW fp32 |" in output
    assert str(tmp_path) not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_optimizer_bench_names_a_rival_that_is_not_installed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench("optimizer_step")
    absent = step.Arm("no_such_package", step.torch_fused, 1, 1)
    monkeypatch.setitem(step.ARMS, "FlashAdamW", absent)
    result = step.measure("FlashAdamW", argparse.Namespace())
    assert "no_such_package" in result["error"]
    assert "NOT MEASURED: MISSING: package no_such_package" in step.table([result])


def test_a_step_that_did_nothing_is_said(bench: Any) -> None:
    done = {
        "arm": "ours e4m11",
        "ms": 6.0,
        "must_move_bytes_per_param": 10.4,
        "gb_per_s": 3e3,
        "copy_gb_per_s": 4e3,
    }
    for moved, said in ((True, False), (False, True)):
        table = bench("optimizer_step").table([{**done, "moved_weights": moved, "finite": True}])
        assert ("did not move" in table) == said and "| 0.75 |" in table


# --- kernels ---


def test_launch_settings_are_constants_that_exist_and_come_back(bench: Any, run_main: Callable[..., str]) -> None:
    pytest.importorskip("triton")
    tune = bench("kernels_tune")
    for kernel in tune.KERNELS:
        first = tune.shipped(kernel)
        assert set(first) == set(kernel.tries) and first in kernel.settings()
        other = next((setting for setting in kernel.settings() if setting != first), first)
        with tune.applied(kernel, other):
            assert tune.shipped(kernel) == other
        assert tune.shipped(kernel) == first
    assert f"{len(tune.KERNELS)} kernels called" in run_main("kernels_tune", "--dry-run")


def test_the_best_settings_stand_beside_the_one_that_ships(bench: Any) -> None:
    tune = bench("kernels_tune")

    def row(words: int, shape: str, us: float, **more: Any) -> dict[str, Any]:
        told = {"shipped": words == 8, "same_bits": True, "share_of_copy": 0.5, "share_of_equal_copy": 0.6, **more}
        return {"kernel": "cast", "shape": shape, "setting": {"WORDS": words}, "us": us, **told}

    rows = [
        row(8, "a", 3.0),
        row(16, "a", 2.0),
        row(32, "a", 1.0, same_bits=False),
        row(8, "b", 3.0),
        row(16, "b", 1.0),
    ]
    lines = tune.table(rows).splitlines()[2:]
    assert lines == [
        "| cast | **ships** WORDS=8 | a: 3.0 (0.50, 0.60), b: 3.0 (0.50, 0.60) |",
        "| cast | WORDS=16 | a: 2.0 (0.50, 0.60), b: 1.0 (0.50, 0.60) |",
    ]
    assert "OTHER BITS" in tune.table([row(8, "a", 3.0), row(32, "a", 1.0, same_bits=False)])
