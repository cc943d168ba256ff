"""A pytest plugin that selects tests by exact node id and writes every outcome as one JSON line.

The runner copies it beside the shim, because upstream's tests run in a checkout that knows nothing of this project.

Environment:
    FP8_DS_CONFORMANCE_SELECT: a JSON list of node ids to keep; unset keeps all.
    FP8_DS_CONFORMANCE_RESULTS: the file that gets the lines ("collected", "start", "phase", "finish").
    FP8_DS_CONFORMANCE_ENGINES: where the shim writes; the lines that a test added go into its "finish" line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

_num_engine_lines = 0


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["FP8_DS_CONFORMANCE_RESULTS"]).open("a") as results:
        results.write(json.dumps(line) + "\n")


def pytest_configure() -> None:
    # Workers are forked from this server: one import there instead of one per worker saves most of a test's seconds.
    forkserver.set_forkserver_preload(["__main__", "deepspeed"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected_file = os.environ.get("FP8_DS_CONFORMANCE_SELECT")
    if selected_file:
        selected = set(json.loads(Path(selected_file).read_text()))
        dropped = [item for item in items if item.nodeid not in selected]
        items[:] = [item for item in items if item.nodeid in selected]
        config.hook.pytest_deselected(items=dropped)
    for item in items:
        _write({"event": "collected", "test": item.nodeid})


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"event": "start", "test": nodeid})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    message = ""
    if report.failed and call.excinfo is not None:
        message = f"{call.excinfo.typename}: {call.excinfo.value}"
    elif report.skipped:
        message = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
    expected_failure = hasattr(report, "wasxfail")
    _write(
        {
            "event": "phase",
            "test": item.nodeid,
            "when": report.when,
            "outcome": {"skipped": "xfailed", "passed": "xpassed"}.get(report.outcome, report.outcome)
            if expected_failure
            else report.outcome,
            "seconds": round(report.duration, 2),
            "message": message[:600],
        }
    )


def pytest_runtest_logfinish(nodeid: str) -> None:
    global _num_engine_lines
    engines_file = Path(os.environ.get("FP8_DS_CONFORMANCE_ENGINES", os.devnull))
    lines = engines_file.read_text().splitlines() if engines_file.exists() else []
    engines = [json.loads(line) for line in lines[_num_engine_lines:]]
    _num_engine_lines = len(lines)
    _write({"event": "finish", "test": nodeid, "engines": engines})
