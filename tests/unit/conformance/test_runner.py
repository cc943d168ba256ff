"""The conformance runner: a crash costs one test, and a difference is explained by nothing but its own reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "conformance"
sys.path.insert(0, str(HERE))

import report  # noqa: E402
import run_upstream  # noqa: E402
from outcomes import Outcome, OutcomeStore  # noqa: E402


@pytest.mark.parametrize(
    ("forgiven", "ours", "is_explained"),
    [
        ([], Outcome("failed", message="UnsupportedError: MoE"), True),
        (["::t$"], Outcome("failed", message="ValueError: MoE"), False),
        (["::t$"], Outcome("passed", num_forgiven=4), True),
        (["::other$"], Outcome("passed", num_forgiven=4), False),
        ([], Outcome("skipped"), False),
    ],
)
def test_a_reason_holds_only_for_the_failure_that_it_names(
    tmp_path: Path, forgiven: list[str], ours: Outcome, is_explained: bool
) -> None:
    reasons = [{"tests": "t", "message": "UnsupportedError", "reason": "Experts.", "refusal": "MoE"}]
    arms = report.Arms(*(OutcomeStore(tmp_path / f"{name}.json", name) for name in ("stock", "ours")))
    arms.stock.tests, arms.ours.tests = {"a.py::t": Outcome("passed")}, {"a.py::t": ours}
    assert (report.unexplained(arms, reasons, forgiven) == []) == is_explained


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
