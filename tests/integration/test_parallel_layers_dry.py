"""parallel_layers.py on CPU: our arms run, what an arm cannot do is said, overlaps are sums of common times."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.nn.fused.search import linears_that_read

OURS = ("ours", "ours-rowwise")


def test_hidden_is_what_runs_under_other_kernels(bench: Any) -> None:
    share = bench("parallel_layers").hidden_share
    computing = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert share([(2.0, 4.0)], computing) == 0.5
    assert share([(2.0, 4.0), (3.0, 6.0)], computing) == 0.5  # 2 to 3 and 5 to 6, of 2 to 6
    assert share([(3.0, 5.0)], computing) == 0.0
    assert share([(0.5, 2.5)], computing) == 1.0
    assert share([], computing) == 0.0


def test_arms_of_one_cell_are_measured_together(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = bench("parallel_layers")
    monkeypatch.setattr("sys.argv", ["parallel_layers.py", "--arms", "ours", "bf16"])
    cells = layers.cells(layers.parse_args())
    assert len(cells) == 2 * 2 * 2 * 2
    assert all(a.tokens == b.tokens and a.shape == b.shape for a, b in zip(cells[::2], cells[1::2], strict=True))


def test_both_norms_of_the_layer_are_seen_to_be_read_by_linears(bench: Any) -> None:
    arms = bench("parallel_layers_arms")
    block = arms.Block(arms.SHAPES["8b"].divided(64))
    assert len(linears_that_read(block, "input_layernorm")) == 3
    assert len(linears_that_read(block, "post_attention_layernorm")) == 2


def test_report_compares_each_of_our_arms_with_the_best_peer_and_names_what_failed(bench: Any) -> None:
    cell = {"ranks": 2, "part": "ffn", "shape": "8b", "tokens": 8192}
    rows = [
        {**cell, "arm": "bf16", "ms": 7.0},
        {**cell, "arm": "torchao", "ms": 5.5},
        {**cell, "arm": "te", "ms": 6.0},
        {**cell, "arm": "ours", "ms": 5.0, "hidden": 0.61, "gather_ms": 0.2, "busy_ms": 4.5},
        {**cell, "arm": "ours-rowwise", "ms": 11.0},
        {**cell, "arm": "ours-compiled", "error": "no such thing"},
    ]
    text = bench("parallel_layers").report(rows)
    assert "| best peer / ours | best peer / ours-rowwise | best peer / ours-compiled |" in text
    assert "| ffn, 8b, 8192 tokens | 7.00 | 5.50 | 6.00 | 5.00 | 11.00 | failed | 1.10 | 0.50 | - |" in text
    text_without_te = bench("parallel_layers").report([row for row in rows if row["arm"] != "te"])
    assert "| ffn, 8b, 8192 tokens | 7.00 | 5.50 | 5.00 | 11.00 | failed | - | - | - |" in text_without_te
    assert "| 2 | ffn, 8b | 8192 | ours | 5.00 | 4.50 | 0.200 | 61% |" in text
    assert "FAILED 2 ranks, ours-compiled, ffn, 8b, 8192 tokens" in text and "no such thing" in text


@pytest.mark.slow
def test_our_arms_run_on_two_ranks(run_main: Callable[..., str], tmp_path: Path) -> None:
    small = ("--gpus", 2, "--shapes", "8b", "--scale", 64, "--tokens", 64, "--out", tmp_path)
    run_main("parallel_layers", *small, "--arms", *OURS, "--layers", 2)
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["arm"]) for row in rows] == [(part, arm) for part in ("ffn", "block") for arm in OURS]
    assert all(row.get("ms", 0) > 0 for row in rows), rows
    assert str(tmp_path) not in "".join(path.read_text() for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
def test_our_compiled_arms_run_on_two_ranks(run_main: Callable[..., str], tmp_path: Path) -> None:
    small = ("--gpus", 2, "--shapes", "8b", "--scale", 64, "--tokens", 64, "--out", tmp_path)
    run_main("parallel_layers", *small, "--arms", "ours-compiled")
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 and all(row.get("ms", 0) > 0 for row in rows), rows
