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
from report import Arms  # noqa: E402


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
    assert outcome.num_forgiven == 0


def test_largest_error_of_the_forgiven_comparisons_is_kept() -> None:
    lines = [{"forced": True, "num_fp8": 1}, {"relative_error": 0.05}, {"relative_error": 0.0712345}]
    outcome = outcomes.parse_events(events("f.py::a", ("call", "failed"), engines=lines), "none", "hang")["f.py::a"]
    assert (outcome.num_fp8_engines, outcome.num_forgiven, outcome.max_relative_error) == (1, 2, 0.0712)


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


def committed_reasons() -> list[dict[str, Any]]:
    return run_upstream.tomllib.loads((HERE / "reasons.toml").read_text())["reason"]


def test_committed_reasons_name_tests_and_a_reason() -> None:
    for row in committed_reasons():
        assert {"tests", "reason"} <= set(row) <= {"tests", "message", "reason", "refusal", "rounding"}
        assert not ("refusal" in row and "rounding" in row)
        re.compile(row["tests"] + row.get("message", ""))


def test_committed_refusals_are_rows_of_the_page_of_refusals() -> None:
    page = (HERE.parents[1] / "docs" / "refusals.md").read_text()
    refusals = [row["refusal"] for row in committed_reasons() if "refusal" in row]
    assert refusals
    for refusal in refusals:
        assert f"\n| {refusal} | " in page


def test_committed_rounding_rows_name_only_comparison_failures() -> None:
    """Otherwise a refusal or a crash could pass for rounding: the row has to want a failure that is run again."""
    for row in committed_reasons():
        for message in ("UnsupportedError: no", "ConfigError: no", "RuntimeError: no", "AssertionError: 3 != 4"):
            assert not (row.get("rounding") and re.search(row.get("message", ""), message))


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


def test_removed_outcomes_stay_away(tmp_path: Path) -> None:
    store = OutcomeStore(tmp_path / "ours.json", "key")
    store.add({"a.py::t": Outcome("passed"), "a.py::u": Outcome("passed")}, "a.py", "hash")
    store.remove(["a.py::t", "a.py::never_ran"])
    assert set(OutcomeStore(tmp_path / "ours.json", "key").tests) == {"a.py::u"}


MISMATCH = "AssertionError: Gradients differ for parameter w"


def arms_of(tmp_path: Path) -> Arms:
    arms = Arms(
        stock=OutcomeStore(tmp_path / "stock.json", "deepspeed-1"),
        ours=OutcomeStore(tmp_path / "ours.json", "deepspeed-1"),
        rounded=OutcomeStore(tmp_path / "ours.json", "deepspeed-1 rounded"),
    )
    arms.stock.tests = {
        "unit/a.py::same": Outcome("passed"),
        "unit/a.py::refused": Outcome("passed"),
        "unit/a.py::broken": Outcome("passed"),
        "unit/a.py::rounds": Outcome("passed"),
        "unit/a.py::both_fail": Outcome("failed", message="stock | says"),
        "unit/a.py::skip": Outcome("skipped", message="no GPU"),
    }
    arms.ours.tests = {
        "unit/a.py::same": Outcome("passed", num_fp8_engines=7),
        "unit/a.py::refused": Outcome("failed", message="UnsupportedError: MoE", num_forced_not_fp8=2),
        "unit/a.py::broken": Outcome("failed", message="ValueError: MoE"),
        "unit/a.py::rounds": Outcome("failed", message=MISMATCH),
        "unit/a.py::both_fail": Outcome("failed", message=MISMATCH),
        "unit/a.py::skip": Outcome("skipped"),
    }
    arms.rounded.tests = {"unit/a.py::rounds": Outcome("passed", num_forgiven=4, max_relative_error=0.051)}
    return arms


REASONS: list[dict[str, Any]] = [
    {"tests": "refused|broken", "message": "UnsupportedError", "reason": "Experts.", "refusal": "MoE"},
    {"tests": "rounds", "message": "Gradients differ", "reason": "Against bf16.", "rounding": True},
]
SELECTION = {"first": [{"file": "unit/a.py"}], "second": []}


def test_reason_holds_only_for_the_failure_it_names(tmp_path: Path) -> None:
    assert report.unexplained(arms_of(tmp_path), REASONS) == ["unit/a.py::broken"]


@pytest.mark.parametrize(
    "rounded",
    [
        None,
        Outcome("failed", message=MISMATCH, num_forgiven=4, max_relative_error=2.0),
        Outcome("hang"),
        Outcome("skipped", num_forgiven=4),
        Outcome("passed", num_forgiven=0),
    ],
)
def test_rounding_explains_nothing_unless_forgiving_it_makes_the_test_pass(
    rounded: Outcome | None, tmp_path: Path
) -> None:
    arms = arms_of(tmp_path)
    arms.rounded.tests = {} if rounded is None else {"unit/a.py::rounds": rounded}
    assert report.unexplained(arms, REASONS) == ["unit/a.py::broken", "unit/a.py::rounds"]
    page = report.render(SELECTION, arms, REASONS)
    assert "| `a.py` | 4 / 1 / 1 / 0 | 1 / 4 / 1 / 0 | 1 / 4 / 1 / 0 | 7 | 2 |" in page
    assert "| **above the bound of FP8's rounding**: Against bf16. |  |" in page
    assert "| **above the bound of FP8's rounding** | Against bf16. | 1 |" in page


def test_second_run_is_for_values_that_differ_from_a_stock_that_passes(tmp_path: Path) -> None:
    arms = arms_of(tmp_path)
    arms.stock.tests["unit/a.py::not_run"] = Outcome("passed")
    assert [test for test in arms.stock.tests if report.needs_rounding_run(test, arms)] == ["unit/a.py::rounds"]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("failed", message=MISMATCH), True),
        (Outcome("failed", message="AssertionError: Tensor-likes are not close! 1 / 2"), True),
        (Outcome("failed", message="AssertionError: FP16 model state tensor([[0.1"), True),
        (Outcome("failed", message="AssertionError: Parameter linear.weight mismatch at step 1"), True),
        (Outcome("passed", message=MISMATCH), False),
        (Outcome("hang", message=MISMATCH), False),
        (Outcome("failed", message="AssertionError: Parameter w not partitioned after backward"), False),
        (Outcome("failed", message="AssertionError: 3 != 4"), False),
        (Outcome("failed", message="UnsupportedError: Gradients differ for parameter"), False),
        (Outcome("failed", message="ConfigError: AssertionError: Gradients differ for parameter"), False),
    ],
)
def test_only_values_that_differ_are_a_comparison_failure(outcome: Outcome, expected: bool) -> None:
    assert outcome.is_comparison_failure is expected


def test_test_skipped_by_ours_alone_is_a_difference_to_explain(tmp_path: Path) -> None:
    arms = arms_of(tmp_path)
    arms.ours.tests["unit/a.py::same"] = Outcome("skipped")
    assert "unit/a.py::same" in report.unexplained(arms, REASONS)


def test_failure_of_stock_alone_needs_no_reason(tmp_path: Path) -> None:
    arms = arms_of(tmp_path)
    arms.ours.tests["unit/a.py::both_fail"] = Outcome("passed")
    assert "unit/a.py::both_fail" not in report.unexplained(arms, REASONS)
    page = report.render(SELECTION, arms, REASONS)
    assert "| `a.py::both_fail` | failed | passed |  | Only stock fails: see below. |" in page


def test_page_shows_all_arms_engines_and_reasons(tmp_path: Path) -> None:
    page = report.render(SELECTION, arms_of(tmp_path), REASONS)
    assert "| `a.py` | 4 / 1 / 1 / 0 | 1 / 4 / 1 / 0 | 2 / 3 / 1 / 0 | 7 | 2 |" in page
    assert "| `a.py::refused` | passed | failed |  | Experts. | MoE |" in page
    assert "| `a.py::broken` | passed | failed |  | **no reason given**: ValueError: MoE |" in page
    assert "| `a.py::rounds` | passed | failed | passed, error 0.051 | Against bf16. |  |" in page
    assert "stock \\| says" in page


def test_page_counts_the_differences_of_each_class(tmp_path: Path) -> None:
    page = report.render(SELECTION, arms_of(tmp_path), REASONS)
    assert "| FP8's rounding, no refusal | Against bf16. | 1 |" in page
    assert "| refusal | Experts. | 1 |" in page
    assert "| **without a reason** |  | 1 |" in page
    assert "| **all** |  | 3 |" in page


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


@pytest.mark.slow
def test_only_the_run_at_fp8_rounding_forgives(tmp_path: Path) -> None:
    """Runs a real pytest: upstream's helpers, as `unit.common` finds them, with the shim as sitecustomize."""
    unit = tmp_path / "unit"
    unit.mkdir()
    (unit / "__init__.py").touch()
    (unit / "common.py").write_text("import torch\n")
    (tmp_path / "test_small.py").write_text(
        "import torch, unit.common\n"
        "a = torch.tensor([1.0, 2.0])\n"
        "def test_rounds(): assert torch.allclose(a * 1.05, a) or torch.testing.assert_close(a * 1.05, a)\n"
        "def test_close(): torch.testing.assert_close(a * 1.05, a)\n"
        "def test_wrong(): torch.testing.assert_close(-a, a)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    runner = run_upstream.Runner(tmp_path, timeout=300, logs=tmp_path / "logs")
    tests = [f"test_small.py::test_{name}" for name in ("rounds", "close", "wrong")]
    found = {
        mode: runner.run("test_small.py", tests, force=False, persistence="none", rounding=mode)
        for mode in ("bf16", "fp8")
    }
    assert [found["bf16"][test].outcome for test in tests] == ["failed"] * 3
    assert [found["fp8"][test].outcome for test in tests] == ["passed", "passed", "failed"]
    assert [found["fp8"][test].num_forgiven for test in tests] == [1, 1, 1]
    assert [found["fp8"][test].max_relative_error for test in tests] == [0.05, 0.05, 2.0]


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
    runner = run_upstream.Runner(tmp_path, timeout=300, logs=tmp_path / "logs")
    tests = runner.collect(["test_small.py"])
    found = runner.run("test_small.py", tests[:4], force=False, persistence="none")
    assert [found[test].outcome for test in tests[:4]] == ["passed", "crash", "skipped", "failed"]
    assert found[tests[3]].message == "ValueError: four"
    assert tests[4] not in found
