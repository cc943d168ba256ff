"""The conformance runner's reading, merging and forcing, on small made-up data."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parents[2] / "conformance"
sys.path.insert(0, str(HERE))

import outcomes  # noqa: E402
import report  # noqa: E402
import run_upstream  # noqa: E402
import shim  # noqa: E402
from outcomes import Outcome, OutcomeStore  # noqa: E402


def events(
    test: str, *phases: tuple[str, str], engines: list[dict[str, Any]] | None = None, finish: bool = True
) -> list[str]:
    lines = [{"event": "start", "test": test}]
    for when, outcome in phases:
        lines.append(
            {
                "event": "phase",
                "test": test,
                "when": when,
                "outcome": outcome,
                "seconds": 1.25,
                "message": f"{when}\nsaid",
            }
        )
    if finish:
        lines.append({"event": "finish", "test": test, "engines": engines or []})
    return [json.dumps(line) for line in lines]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "passed"),
        ([("setup", "failed"), ("teardown", "passed")], "error"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "error"),
        ([("setup", "skipped"), ("teardown", "passed")], "skipped"),
        ([("setup", "passed"), ("call", "xfailed"), ("teardown", "passed")], "xfailed"),
        ([("setup", "passed"), ("call", "skipped"), ("teardown", "failed")], "error"),
    ],
)
def test_worst_phase_is_the_outcome(phases: list[tuple[str, str]], expected: str) -> None:
    (outcome,) = outcomes.parse_events(events("f.py::t", *phases), "none", "crash").values()
    assert outcome.outcome == expected
    assert outcome.seconds == pytest.approx(1.25 * len(phases), abs=0.06)


def test_unfinished_test_is_the_one_that_hung() -> None:
    lines = events("f.py::a", ("call", "passed")) + events("f.py::b", ("setup", "passed"), finish=False)
    found = outcomes.parse_events(lines, "none", "hang")
    assert {test: outcome.outcome for test, outcome in found.items()} == {"f.py::a": "passed", "f.py::b": "hang"}


def test_only_engines_with_fp8_weights_count_as_engaged() -> None:
    engines = [
        {"forced": True, "num_fp8": 4},
        {"forced": True, "num_fp8": 0},
        {"forced": False, "why": "offload"},
        {"forced": False, "why": "offload"},
    ]
    outcome = outcomes.parse_events(events("f.py::a", ("call", "passed"), engines=engines), "none", "hang")["f.py::a"]
    assert (outcome.num_fp8_engines, outcome.num_forced_not_fp8, outcome.not_forced) == (1, 1, {"offload": 2})


def test_selection_keeps_any_of_keep_and_none_of_drop() -> None:
    tests = ["a.py::T::x[bf16-1]", "a.py::T::x[bf16-2]", "a.py::T::y[fp16-1]", "aa.py::T::x[bf16-1]"]
    assert outcomes.select({"file": "a.py"}, tests) == tests[:3]
    assert outcomes.select({"file": "a.py", "keep": ["bf16"], "drop": [r"-2\]"]}, tests) == tests[:1]


def test_committed_selection_is_sound() -> None:
    selection = run_upstream.tomllib.loads((HERE / "selection.toml").read_text())
    entries = selection["first"] + selection["second"]
    assert len({entry["file"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) <= {"file", "keep", "drop"}
        for pattern in entry.get("keep", []) + entry.get("drop", []):
            re.compile(pattern)


def test_committed_reasons_name_tests_and_a_reason() -> None:
    for row in run_upstream.tomllib.loads((HERE / "reasons.toml").read_text())["reason"]:
        assert {"tests", "reason"} <= set(row) <= {"tests", "message", "reason", "refusal"}
        re.compile(row["tests"] + row.get("message", ""))


def test_store_returns_what_it_saved_and_keeps_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    for key in ("deepspeed-1", "deepspeed-2"):
        store = OutcomeStore(path, key)
        store.upstream = f"commit of {key}"
        store.add({"a.py::t": Outcome("skipped", 2.0, key, "default", 3, 1, {"offload": 1})}, "a.py", "hash")
    again = OutcomeStore(path, "deepspeed-1")
    assert again.tests == {"a.py::t": Outcome("skipped", 2.0, "deepspeed-1", "default", 3, 1, {"offload": 1})}
    assert again.upstream == "commit of deepspeed-1"
    assert OutcomeStore(path, "deepspeed-3").tests == {}


def test_changed_upstream_file_makes_its_outcomes_unknown(tmp_path: Path) -> None:
    store = OutcomeStore(tmp_path / "baseline.json", "key")
    store.add({"a.py::t": Outcome("passed")}, "a.py", "old")
    store.add({"b.py::t": Outcome("passed")}, "b.py", "old")
    assert store.known(["a.py::t", "a.py::u"], "old") == ["a.py::t"]
    assert store.known(["a.py::t"], "new") == []
    store.add({"a.py::u": Outcome("passed")}, "a.py", "new")
    assert sorted(store.tests) == ["a.py::u", "b.py::t"]


def stores(tmp_path: Path) -> tuple[OutcomeStore, OutcomeStore]:
    stock, ours = (
        OutcomeStore(tmp_path / "stock.json", "deepspeed-1"),
        OutcomeStore(tmp_path / "ours.json", "deepspeed-1"),
    )
    stock.tests = {
        "unit/a.py::same": Outcome("passed"),
        "unit/a.py::refused": Outcome("passed"),
        "unit/a.py::broken": Outcome("passed"),
        "unit/a.py::both_fail": Outcome("failed", message="stock | says"),
        "unit/a.py::skip": Outcome("skipped", message="no GPU"),
    }
    ours.tests = {
        "unit/a.py::same": Outcome("passed", num_fp8_engines=7),
        "unit/a.py::refused": Outcome("failed", message="UnsupportedError: MoE", num_forced_not_fp8=2),
        "unit/a.py::broken": Outcome("failed", message="ValueError: MoE"),
        "unit/a.py::both_fail": Outcome("error"),
        "unit/a.py::skip": Outcome("skipped"),
    }
    return stock, ours


REASONS = [{"tests": "refused|broken", "message": "UnsupportedError", "reason": "Experts.", "refusal": "MoE"}]


def test_reason_holds_only_for_the_failure_it_names(tmp_path: Path) -> None:
    assert report.unexplained(*stores(tmp_path), REASONS) == ["unit/a.py::broken"]


def test_test_skipped_by_ours_alone_is_a_difference_to_explain(tmp_path: Path) -> None:
    stock, ours = stores(tmp_path)
    ours.tests["unit/a.py::same"] = Outcome("skipped")
    assert "unit/a.py::same" in report.unexplained(stock, ours, REASONS)


def test_failure_of_stock_alone_needs_no_reason(tmp_path: Path) -> None:
    stock, ours = stores(tmp_path)
    ours.tests["unit/a.py::both_fail"] = Outcome("passed")
    page = report.render({"first": [{"file": "unit/a.py"}], "second": []}, stock, ours, REASONS)
    assert "| `a.py::both_fail` | failed | passed | Only stock fails: see below. |" in page


def test_page_shows_both_arms_engines_and_reasons(tmp_path: Path) -> None:
    page = report.render({"first": [{"file": "unit/a.py"}], "second": []}, *stores(tmp_path), REASONS)
    assert "| `a.py` | 3 / 1 / 1 / 0 | 1 / 3 / 1 / 0 | 7 | 2 |" in page
    assert "| `a.py::refused` | passed | failed | Experts. | MoE |" in page
    assert "| `a.py::broken` | passed | failed | **no reason given**: ValueError: MoE |" in page
    assert "stock \\| says" in page


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BF16 | {"zero_optimization": {"stage": 2}}, None),
        (
            BF16 | {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": None}},
            None,
        ),
        ({"zero_optimization": {"stage": 2}}, "bf16 is off"),
        (BF16, "ZeRO stage 0"),
        (BF16 | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload"),
        (BF16 | {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        (BF16 | {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, "mics_shard_size"),
        (BF16 | {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        (BF16 | {"zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": True}}, "torch_autocast"),
        (BF16 | {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}, None),
    ],
)
def test_refused_configurations_are_left_alone(config: dict[str, Any], why: str | None) -> None:
    assert shim.why_not_fp8(config) == why


def test_only_untied_trainable_plain_linears_count() -> None:
    assert shim.why_no_layer(torch.nn.Sequential(torch.nn.Linear(2, 2))) is None
    assert shim.why_no_layer(torch.nn.LayerNorm(2)) is not None
    assert shim.why_no_layer(torch.nn.Linear(2, 2).requires_grad_(False)) is not None
    tied = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Embedding(2, 2)])
    tied[1].weight = tied[0].weight
    assert shim.why_no_layer(tied) is not None


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("way", ["config", "config_params", "file", "args"])
def test_forced_initialize_adds_the_block_and_leaves_the_users_dict(
    force: bool, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    module = torch.nn.Linear(2, 2)
    module.weight._fp8 = object()  # what the engine hangs on a weight

    def initialize(args: Any = None, model: Any = None, config: Any = None, config_params: Any = None) -> Any:
        seen.update(config or config_params)
        return (SimpleNamespace(module=model),)

    monkeypatch.setenv("FP8_DS_CONFORMANCE_PERSISTENCE", "none")
    monkeypatch.setenv("FP8_DS_CONFORMANCE_ENGINES", str(tmp_path / "engines"))
    monkeypatch.delenv("RANK", raising=False)
    config = BF16 | {"zero_optimization": {"stage": 3}}
    before = json.dumps(config)
    (tmp_path / "ds.json").write_text(before)
    kwargs: dict[str, Any] = {
        "config": {"config": config},
        "config_params": {"config_params": config},
        "file": {"config": str(tmp_path / "ds.json")},
        "args": {"args": SimpleNamespace(deepspeed_config=str(tmp_path / "ds.json"))},
    }[way]
    shim.wrap_initialize(initialize, force)(model=module, **kwargs)
    assert seen["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert ("fp8" in seen) == force
    assert json.dumps(config) == before
    line = json.loads((tmp_path / "engines").read_text())
    assert line["forced"] == force and line.get("num_fp8", 0) == int(force)


def test_crash_costs_one_test_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Runs a real pytest: the recorder, the shim as sitecustomize, and the restart after a dead process."""
    (tmp_path / "test_small.py").write_text(
        "import os, sys, pytest\n"
        "def test_a(): assert 'sitecustomize' in sys.modules and 'deepspeed' not in sys.modules\n"
        "def test_b(): os._exit(3)\n"
        "def test_c(): pytest.skip('no reason')\n"
        "def test_d(): raise ValueError('four')\n"
        "def test_e(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    runner = run_upstream.Runner(tmp_path, timeout=60, logs=tmp_path / "logs")
    tests = runner.collect(["test_small.py"])
    found = runner.run("test_small.py", tests[:4], force=False, persistence="none")
    assert [found[test].outcome for test in tests[:4]] == ["passed", "crash", "skipped", "failed"]
    assert found[tests[3]].message == "ValueError: four"
    assert tests[4] not in found
