"""benchmarks/attention.py on CPU at a tiny size: it runs, and its tables can be bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = (
    "--device",
    "cpu",
    "--lengths",
    32,
    "--tokens",
    64,
    "--dims",
    64,
    "--accuracy-length",
    48,
    "--accuracy-heads",
    2,
)


@pytest.mark.slow
def test_attention_benchmark_runs_dry(run_main: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "mine.pt"
    torch.save({"mine": [torch.randn(1, 20, 2, 64) for _ in range(4)]}, file)
    text = run_main("attention", *TINY, "--train-steps", 1, "--activations", file, "--out", tmp_path)
    result = json.loads(next(tmp_path.glob("*-attention.json")).read_text())
    assert {row["inputs"] for row in result["accuracy"]} == {
        "normal", "outlier channels", "rare outliers", "trained, first layer", "trained, last layer", "mine",
    }  # fmt: skip
    by_arm = {row["arm"]: row for row in result["accuracy"] if row["inputs"] == "normal"}
    assert by_arm["bf16, plain"]["out_sqnr_db"] > 45 > by_arm["FP8 emulated"]["out_sqnr_db"] > 20
    assert "FA3 FP8: SKIPPED: FlashAttention-3: expected a Hopper GPU" in text
    assert [row["arm"] for row in result["latency"]] == ["SDPA flash (FA2)"] and len(result["casts"]) == 1
    assert str(tmp_path) not in text


def test_an_arm_that_fails_has_a_row_that_says_so(
    bench: Any, run_main: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    monkeypatch.setitem(bench("attention").ARMS, "SDPA flash (FA2)", fail)
    text = run_main("attention", *TINY, "--parts", "latency", "--out", tmp_path)
    assert "| SDPA flash (FA2) | **RuntimeError: no kernel for this** |" in text


def test_the_truth_is_float64_of_the_bf16_inputs_and_errors_see_a_wrong_gradient(bench: Any) -> None:
    accuracy = bench("attention_accuracy")
    inputs = accuracy.normal(32, 2, 1, 16).to("cpu")
    exact = accuracy.truth(inputs)
    assert all(x.dtype == torch.float64 for x in exact)
    wrong = [exact[0], exact[1] * 1.01, *exact[2:]]
    row = accuracy.errors(exact, wrong)
    assert row["dq_sqnr_db"] == pytest.approx(40) and row["dk_sqnr_db"] == float("inf")
    assert row["dq_rmse"] == pytest.approx(0.01 * exact[1].square().mean().sqrt().item())


def test_latency_tables_show_rates_and_holes(bench: Any) -> None:
    report = bench("attention_report")
    row = {"arm": "FA3 FP8", "dim": 128, "length": 8192, "batch": 2, "heads": 16, "forward_ms": 1.0,
           "backward_ms": 2.5, "forward_tflops": 549.8, "backward_tflops": 549.8}  # fmt: skip
    table = report.latency_table([row, {**row, "arm": "cuDNN bf16", "length": 2048}], 128)
    assert table[2:] == [
        "| | 2k | 8k |", "|---|---|---|", "| FA3 FP8 | not measured | 1.00 + 2.50 (550 / 550) |",
        "| cuDNN bf16 | 1.00 + 2.50 (550 / 550) | not measured |", "",
    ]  # fmt: skip


def test_outlier_channels_are_larger_in_q_and_k_only(bench: Any) -> None:
    accuracy = bench("attention_accuracy")
    plain = accuracy.normal(256, 2, 2, 64)
    changed = accuracy.outlier_channels(plain)
    for x in (changed.q, changed.k):
        spread = x.std(1)[0]
        assert ((spread > 10 * spread.median()).sum(1) == accuracy.OUTLIER_CHANNELS).all()
    assert changed.v is plain.v
    old, new = (torch.einsum("bihd,bjhd->bhij", x.q, x.k).square().mean().sqrt().item() for x in (plain, changed))
    assert new == pytest.approx(old, rel=0.2)
