"""Benchmark scripts as modules, and run as if from the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench(name): the script of that name as a module."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))

    def load(name: str) -> ModuleType:
        return import_module(name)

    return load


@pytest.fixture
def run_main(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cpu_environment: dict[str, str],
) -> Callable[..., str]:
    """run_main(name, *arguments): what the script prints; its workers are processes of their own."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        for key in ("PATH", "PYTHONPATH"):
            monkeypatch.setenv(key, cpu_environment[key])
        bench(name).main()
        return capsys.readouterr().out

    return run
