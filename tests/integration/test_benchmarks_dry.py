"""Each benchmark script runs once on CPU at a tiny size and leaves its numbers in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import HANG

MEGATRON_CLONE = os.environ.get("MEGATRON_LM_PATH")


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


@pytest.mark.slow
@pytest.mark.launcher
def test_end_to_end_profiles_a_step(run_main: Callable[..., str], tmp_path: Path) -> None:
    own = ("--cache", tmp_path / "text", "--out", tmp_path / "out")
    run_main("end_to_end", "--model", "tiny-llama", "--profile", "--arms", "stock-eager", "ours-e4m11-eager", *own)
    (run,) = written(tmp_path / "out", "*-training.json")["runs"]
    assert len(run["results"]) == 2
    assert all(one["host"]["cpu_ops"] > 1000 and one["ranks"][0]["host_ms"] > 0 for one in run["results"])


def test_gather_measures_both_dtypes(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("gather", "--gpus", 2, "--scale", 4096, "--out", tmp_path)
    (run,) = written(tmp_path, "*-gather.json")
    layer = {name: row["bytes"] for name, row in run["layer"].items()}
    weights = 218_103_808 // 4096
    assert layer["fp8, one buffer"] == layer["fp8, ZeRO-3's own"] == weights
    assert layer["bf16, one buffer"] == layer["bf16, ZeRO-3's own"] == 2 * weights


@pytest.mark.slow
def test_attention_measures_accuracy_and_latency(run_main: Callable[..., str], tmp_path: Path) -> None:
    sizes = ("--lengths", 32, "--tokens", 64, "--dims", 64, "--accuracy-length", 48, "--accuracy-heads", 2)
    run_main("attention", "--device", "cpu", *sizes, "--train-steps", 1, "--out", tmp_path)
    found = written(tmp_path, "*-attention.json")
    sqnr = {row["arm"]: row["out_sqnr_db"] for row in found["accuracy"] if row["inputs"] == "normal"}
    assert sqnr["bf16, plain"] > 45 > sqnr["FP8 emulated"] > 20
    assert [row["arm"] for row in found["latency"]] == ["SDPA flash (FA2)"]


@pytest.mark.slow
def test_optimizer_step_measures_an_arm(run_main: Callable[..., str], tmp_path: Path) -> None:
    tiny = ("--layers", 1, "--hidden", 128, "--vocab", 64, "--steps", 2, "--out", tmp_path, "--arm-timeout", HANG)
    run_main("optimizer_step", *tiny, "--arms", "torch fused AdamW fp32")
    found = written(tmp_path, "*.jsonl")
    assert found["parameters"] == 4 * 128 * 128 + 3 * 448 * 128 + 2 * 64 * 128 + 3 * 128
    assert found["moved_weights"] and found["finite"] and found["ms"] > 0


def test_kernels_tune_calls_every_kernel(bench: Any, run_main: Callable[..., str]) -> None:
    pytest.importorskip("triton")
    num_kernels = len(bench("kernels_tune").KERNELS)
    assert f"{num_kernels} kernels called" in run_main("kernels_tune", "--dry-run")


@pytest.mark.slow
def test_linear_host_times_a_linear_beside_bf16(root: Path, tmp_path: Path) -> None:
    """In a process of its own: the stand-in for Triton's driver is set for good there."""
    few = "linear_host.NUM_CALLS = 3"
    command = [sys.executable, "-c", f"import linear_host; {few}; linear_host.main()", "--out", str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "benchmarks"), str(root), *filter(None, [env.get("PYTHONPATH")])])
    subprocess.run(command, env=env, timeout=HANG, check=True, stdout=-3)
    for row in written(tmp_path, "*.json")["rows"]:
        assert all(row[way][f"{part}_us"] > 0 for way in ("fp8", "bf16") for part in ("forward", "backward", "host"))


@pytest.mark.slow
def test_parallel_layers_run_on_two_ranks(run_main: Callable[..., str], tmp_path: Path) -> None:
    small = ("--gpus", 2, "--shapes", "8b", "--scale", 64, "--tokens", 64, "--out", tmp_path)
    run_main("parallel_layers", *small, "--arms", "ours", "ours-rowwise", "--layers", 2)
    rows = written(tmp_path, "*.json")["rows"]
    assert len(rows) == 4 and all(row.get("ms", 0) > 0 for row in rows), rows


@pytest.mark.slow
@pytest.mark.skipif(not MEGATRON_CLONE, reason="MEGATRON_LM_PATH names no clone of Megatron-LM")
def test_megatron_pretrain_gives_losses(run_main: Callable[..., str], tmp_path: Path) -> None:
    small = ("--model", "tiny-llama", "--iterations", 8, "--warm-up", 2, "--on-cpu", "--out", tmp_path)
    where = ("--mode", "losses", "--megatron-path", str(MEGATRON_CLONE), "--cache", tmp_path / "cache")
    run_main("megatron_pretrain", *small, *where, "--arms", "stock-bf16", "ours-a+bf16grads")
    (run,) = written(tmp_path, "*-megatron-pretrain.json")["runs"]
    stock, ours = run["results"]
    assert [iteration for iteration, _ in ours["losses"]] == list(range(1, 9)) and ours["finite"]
    assert stock["losses"] != ours["losses"]
    assert ours["held_out_loss"] == pytest.approx(stock["held_out_loss"], rel=0.01)
