"""Benchmark scripts that run once on CPU at a tiny size."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from support.scripts import run_command, run_script


@pytest.fixture
def benchmark(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """benchmark(name): a script of benchmarks/, imported."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return import_module


@pytest.fixture
def text_cache(
    benchmark: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """For the tokens of a dry run, from some folders of the standard library: to read all takes ten seconds."""
    script = benchmark("training_text")
    (stdlib,) = (root for root in script.text_roots() if Path(os.__file__).is_relative_to(root))
    folder = Path(os.__file__).parent
    assert folder == stdlib or stdlib in folder.parents
    monkeypatch.setattr(script, "text_roots", lambda: [folder / name for name in ("asyncio", "email", "unittest")])
    return tmp_path_factory.getbasetemp() / "text"


@pytest.fixture
def run_main(
    benchmark: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cpu_environment: dict[str, str],
) -> Callable[..., str]:
    """run_main(name, *arguments): what the script prints; its workers are processes of their own, which are forked."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        for key in ("PATH", "PYTHONPATH"):
            monkeypatch.setenv(key, cpu_environment[key])
        for module in (benchmark("processes"), benchmark(name)):
            monkeypatch.setattr(module, "run_or_end", run_command, raising=False)
        benchmark(name).main()
        return capsys.readouterr().out

    return run


def test_end_to_end_gives_speed_and_losses(run_main: Callable[..., str], text_cache: Path, tmp_path: Path) -> None:
    arms = ("--reference", "torch-eager", "--arms", "ours-e4m11-eager")
    own = ("--steps", 40, "--held-out-tokens", 1024, "--cache", text_cache, "--out", tmp_path / "out")
    run_main("end_to_end", "--model", "tiny-llama", *arms, *own)
    (path,) = (tmp_path / "out").glob("*-training.json")
    assert str(tmp_path) not in path.read_text()
    (run,) = json.loads(path.read_text())["runs"]
    plain, ours, second = run["results"]
    assert len(plain["losses"]) == 4 and plain["losses"][-1] < plain["losses"][0] - 0.2
    # The same weights and the same tokens: and the second run of bf16 has other weights.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.005)
    assert second["losses"][0] != plain["losses"][0] and ours["fp8"]["resident_weight_bytes"] > 0


def test_what_benchmarks_and_examples_import_of_us_is_there(root: Path) -> None:
    """Within functions, too, which no dry run of the default suite may call."""
    found = set()
    for path in [*(root / "benchmarks").glob("*.py"), *(root / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fp8_ds":
                found |= {(node.module, name.name) for name in node.names}
    assert len(found) > 20
    for module, name in sorted(found):
        assert hasattr(import_module(module), name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)


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


def test_two_commits_are_measured_in_turns(
    benchmark: Callable[[str], Any], run_main: Callable[..., str], root: Path, tmp_path: Path
) -> None:
    sizes = {"width": 64, "layers": 1, "tokens": 32, "steps": 6, "rounds": 1}
    options = [text for name, size in sizes.items() for text in (f"--{name}", size)]
    ways = ("ZeRO-2 fp32", "ZeRO-3 release")
    run_main("two_commits", "--old", root, "--ways", *ways, *options, "--out", tmp_path)
    (path,) = tmp_path.glob("*-two-commits.json")
    runs = json.loads(path.read_text())
    assert runs.keys() == {"old", "new"}
    for row in (row for run in runs.values() for row in (run[0][way] for way in ways)):
        assert row["step ms"] > 0 and row["host ms"] > 0
    rows = [{"way": {"step ms": ms, "host ms": 2.0, "peak MiB": 3.0}} for ms in (10.0, 10.05, 10.4, 10.6)]
    table = benchmark("two_commits").table
    assert "**no**" not in table([rows[0], rows[2]], [rows[2]], ["way"])  # within the old one's spread
    assert "**no**" not in table([rows[0]], [rows[1]], ["way"]) and "**no**" in table([rows[0]], [rows[3]], ["way"])


@pytest.mark.slow
def test_serving_compares_both_ends_in_both_forms(
    root: Path, cpu_environment: dict[str, str], text_cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    options = (
        "--model",
        "tiny-llama",
        "--steps",
        40,
        "--held-out-tokens",
        2048,
        "--cache",
        text_cache,
        "--out",
        tmp_path,
    )
    run_script(root / "benchmarks/serving.py", options, cpu_environment, tmp_path / "log")
    (path,) = tmp_path.glob("*-serving.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["end"] for row in rows] == ["FP8"] * 6 + ["3 % in bf16"] * 6
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) > 6 and max(losses) < 1.01 * min(losses)
    assert all(row["db"] is None or 25 < row["db"] < 80 for row in rows)
    assert {row["loader"] for row in rows} <= {"", "the same bits", "not by this version"}


def test_rows_out_of_box_contain_every_pair(benchmark: Callable[[str], Any]) -> None:
    script = benchmark("out_of_box")
    rows = script.ROWS
    assert len(set(rows)) == len(rows) <= 36
    levels = [sorted(set(column)) for column in zip(*rows, strict=True)]
    assert levels == [
        sorted(["llama", "qwen2", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "mixtral"]),
        [768, 1024, 2048, 4096, 8192],
        [2, 3],
        ["compiled", "eager"],
        ["checkpointed", "kept"],
        ["enabled", "fast"],
    ]
    for number, column in enumerate(zip(*rows, strict=True)):
        assert min(column.count(level) for level in levels[number]) >= 3
    for one, other in combinations(range(len(levels)), 2):
        pairs = set(product(levels[one], levels[other]))
        if (one, other) == (0, 1):  # 8192 is for some models only
            pairs = {pair for pair in pairs if pair[1] != 8192}
        assert pairs <= {(row[one], row[other]) for row in rows}
    # Compiled bf16 beside eager rows comes last; a row's own runs come before those of the next.
    names = [run.name for run in script.wanted(rows)]
    assert names[:4] == [
        "llama 4096 2 eager kept bf16",
        "llama 4096 2 compiled kept enabled",
        "llama 4096 2 compiled kept bf16",
        "llama 4096 2 compiled kept fast",
    ]
    assert len(set(names)) == len(names) and names[-1].endswith("compiled kept bf16")


def test_runs_out_of_box_have_the_gpus_that_are_named(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = benchmark("out_of_box")
    monkeypatch.setattr(script, "uses_cuda", lambda: True)
    for named, expected in ((None, ["0", "1"]), ("5,3", ["5", "3"])):
        if named is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert [script.environment(gpu)["CUDA_VISIBLE_DEVICES"] for gpu in range(2)] == expected


def test_steps_in_bf16_are_timed_apart(benchmark: Callable[[str], Any]) -> None:
    run, script = benchmark("out_of_box_run"), benchmark("out_of_box")
    blocks = [run.Block(last, 500.0 if last <= 40 else 10.0, last / 10, 4.0, 0) for last in range(4, 97, 4)]
    blocks += [run.Block(100, 900.0, 10.0, 9.0, 7)]  # takes the step at which it compiles again
    blocks += [run.Block(last, ms, 0.0, 6.0, 7) for last, ms in ((104, 90.0), (108, 20.0), (112, 20.0), (116, 21.0))]
    found = run.phases(blocks, 40, 100)
    assert (found["step_ms"], found["bf16_ms"], found["gib"], found["bf16_gib"]) == (10, 20, 4, 6)
    assert (found["loss"], found["first_s"], found["switch_s"]) == (9.2, 2, 3.6)  # (8.4 + 8.8 + 9.2 + 9.6 + 10) / 5
    assert script.mean_ms(found) == pytest.approx(0.97 * 10 + 0.03 * 20)
    assert script.mean_ms(run.phases(blocks[:24], 40, 100)) == 10
    always = [block._replace(num_in_bf16=7) for block in blocks]  # too small for FP8
    assert run.phases(always, 40, 100) == found | {"switch_s": None, "num_in_bf16": 7}


def test_out_of_box_measures_what_is_missing(
    run_main: Callable[..., str],
    benchmark: Callable[[str], Any],
    text_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = benchmark("out_of_box")
    (row,) = (row for row in script.ROWS if row[:4] == ("gpt2", 4096, 2, "eager"))
    block = {"enabled": True, "schedule": {"bf16_last_fraction": 0.03}}
    monkeypatch.setattr(script, "ROWS", (row,))
    width, sizes = script.TINY
    monkeypatch.setattr(script, "TINY", (width, sizes._replace(layers=3)))
    unknown = row._replace(setting="fallback")
    monkeypatch.setattr(script, "FALLBACK_ROWS", (unknown,))
    monkeypatch.setattr(script, "SETTINGS", {"bf16": None, "enabled": block, "fallback": {"enabled": True}})
    monkeypatch.setattr(script, "STEPS_COMPILED_BF16", 28)
    run_main("out_of_box", "--cache", text_cache, "--out", tmp_path)
    (path,) = tmp_path.glob("*-out-of-box.json")
    state = json.loads(path.read_text())
    eager, ours, compiled = (state["runs"][run.name] for run in script.wanted([row]))
    assert ours["bf16_ms"] > 0 and ours["plan"].startswith("fp8: 12 of 13 linears")
    assert eager["bf16_ms"] is None and eager["plan"] == "" and compiled["loss"] is None
    fallback = state["runs"][unknown.name]
    assert fallback["bf16_ms"] is None and fallback["num_in_bf16"] == 8 > ours["num_in_bf16"]
    assert fallback["loss"] == pytest.approx(eager["loss"], rel=0.005)
    # The same weights and the same text.
    assert ours["loss"] == pytest.approx(eager["loss"], rel=0.005) and eager["loss"] < 5
    assert str(tmp_path) not in path.read_text()
    # The next piece takes what failed, and nothing else.
    state["runs"][row.name] = {"error": "out of memory", "wall_s": 1.0}
    resumed = tmp_path / "resumed.json"
    resumed.write_text(json.dumps(state))
    taken = []

    def run_one(spec: dict[str, Any], stem: Path, gpu: int, limit: float) -> tuple[int, dict[str, Any], str]:
        taken.append((gpu, spec["ds_config"].get("fp8")))
        result = {"step_ms": 2.0, "bf16_ms": 4.0, "gib": 1.0, "bf16_gib": 2.0, "loss": 4.0, "plan": "fp8: 8 of 9"}
        result["num_in_bf16"] = 3
        return 0, {**result, "wall_s": 1.0}, "printed"

    monkeypatch.setattr(script, "run_one", run_one)
    printed = run_main("out_of_box", "--cache", text_cache, "--resume", resumed, "--out", tmp_path)
    assert taken == [(0, block)]
    ratio = eager["step_ms"] / (0.97 * 2 + 0.03 * 4)
    assert f"2.0, 4.0 | {ratio:.2f} (1.3) | {eager['step_ms'] / compiled['step_ms']:.2f} |" in printed
    assert "8 of 9, 3 of them stay bf16" in printed
    assert "1 of 1 rows are measured: 1 are at least as fast, 1 reach their target" in printed
    assert "Least sizes" not in printed
    named = row._replace(setting="enabled>=1e13").name
    args = ("--cache", text_cache, "--resume", resumed, "--out", tmp_path, "--runs", named)
    printed = run_main("out_of_box", *args)
    assert taken[1:] == [(0, {**block, "linear": {"min_size": 10**13}})]
    assert "| enabled>=1e13 |" in printed.partition("## Least sizes of a linear")[2]


def test_summary_of_trainer_leaves_out_the_change_to_bf16(benchmark: Callable[[str], Any]) -> None:
    script = benchmark("trainer")
    clock, seconds = [(0, 100.0, 9.0, None)], 100.0
    for step in range(2, 171, 2):
        ms = 5000.0 if step in (2, 4, 166) else 40.0 if step > 166 else 10.0  # steps 166 to 170 are in bf16
        seconds += 2 * ms / 1000
        gib = 20.0 if step in (2, 20, 166) else 7.0 if step > 166 else 3.0
        clock.append((step, seconds, gib, step / 10))
    line = "fp8: from step 165 on 8 of 28 FP8 linears compute in bf16 (bf16_last_fraction: from step 165)"
    found = script.summary(clock, [line])
    assert (found["step_ms"], found["bf16_ms"], found["gib"], found["bf16_gib"]) == (10, 40, 3, 7)
    assert found["loss"] == pytest.approx(16.1) and found["first_s"] == 20  # (15.2 + 15.4 + ... + 17.0) / 10
    assert script.summary(clock, [])["bf16_ms"] is None


def test_trainer_measures_what_is_missing(
    run_main: Callable[..., str],
    benchmark: Callable[[str], Any],
    text_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("trl")
    script = benchmark("trainer")
    rows = [row for row in script.ROWS if row[1:3] == (2, "eager")]
    (bf16, ours), (sft_bf16, sft) = ([script.Run(*row, is_ours) for is_ours in (False, True)] for row in rows)
    about = {"text": script.prepare(text_cache / "bytes-256-400000", "bytes", 256, 0, 400_000)[0].describe()}
    about |= {"steps": 30, "tokens": 64}
    known = {"step_ms": 32.0, "bf16_ms": None, "gib": 1.0, "bf16_gib": None, "loss": 5.0, "first_s": 1.0, "said": []}
    runs = {bf16.name: {**known, "wall_s": 1e9}, sft_bf16.name: {"error": "out of memory", "wall_s": 1.0}}
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"machine": {}, **about, "runs": runs}))
    monkeypatch.setattr(script, "ROWS", rows)
    own = ("--rows", 1, 2, "--steps", 30, "--cache", text_cache, "--resume", before, "--out", tmp_path / "out")
    printed = run_main("trainer", *own)
    # The run that failed comes last, and there is no time for another like the known one.
    assert printed.index(f"{sft.name}: ") < printed.index(f"{sft_bf16.name}: left out, ")
    (path,) = (tmp_path / "out").glob("*-trainer.json")
    found = json.loads(path.read_text())["runs"]
    assert found.keys() == {bf16.name, ours.name, sft_bf16.name, sft.name} and found[bf16.name] == runs[bf16.name]
    for run in (ours, sft):
        assert "(bf16_last_fraction: from step 29)" in found[run.name]["said"][-1]
    # The same weights, and the same text in the same order.
    assert found[sft.name]["losses"] == pytest.approx(found[ours.name]["losses"], rel=0.005)
    assert found[ours.name]["loss"] < found[ours.name]["losses"][0] - 0.2
    assert f"| 2,000; {64_000 / found[ours.name]['step_ms']:,.0f} | {32 / found[ours.name]['step_ms']:.2f} |" in printed
    assert "| SFTTrainer | 2 | eager, checkpointing | **out of memory** |" in printed


def test_trainers_script_is_told_of_fp8_by_one_key(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    script = benchmark("trainer")
    words, configs = [], []
    for is_ours in (False, True):
        words.append(script.command(script.Run("SFTTrainer", 3, "compiled", "kept", is_ours), tmp_path, tmp_path, 30))
        configs.append(json.loads((tmp_path / "ds.json").read_text()))
    python, *arguments = words[0]
    assert words[1] == [python, "-m", "fp8_ds.run", *arguments]
    assert configs[1] == configs[0] | {"fp8": {"enabled": True}} and "fp8" not in configs[0]
    assert "fp8" not in Path(arguments[0]).read_text().split('"""', 2)[2]
