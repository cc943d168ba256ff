"""The programs of fp8_ds.checkpoint, started with what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("universal", ("3",), "universal checkpoint: expected model files and zero/optimizer_state.pt"),
    ],
)
def test_what_is_refused_is_the_message_alone(
    tmp_path: Path, program: str, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", f"fp8_ds.checkpoint.{program}", "empty", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
