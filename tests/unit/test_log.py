"""The logger "fp8_ds" by itself, beside a root logger with handlers, and silenced."""

from __future__ import annotations

import subprocess
import sys

import pytest

LINES = 'logger = logging.getLogger("fp8_ds"); logger.info("a notice"); logger.warning("a problem")'


@pytest.mark.parametrize(
    ("before", "stdout", "stderr"),
    [
        ("", ["[INFO] [fp8_ds] a notice", "[WARNING] [fp8_ds] a problem"], []),
        ('logging.basicConfig(format="%(message)s"); ', [], ["a notice", "a problem"]),
        ('logging.getLogger("fp8_ds").setLevel("WARNING"); ', ["[WARNING] [fp8_ds] a problem"], []),
    ],
    ids=["by itself", "root logger", "silenced"],
)
def test_notices_are_shown_once_unless_the_user_wants_otherwise(
    before: str, stdout: list[str], stderr: list[str]
) -> None:
    code = f"import logging; {before}import fp8_ds.log; {LINES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    for printed, expected in ((done.stdout, stdout), (done.stderr, stderr)):
        lines = printed.splitlines()
        assert len(lines) == len(expected) and all(map(str.endswith, lines, expected)), printed


def test_a_stream_that_is_closed_ends_nothing() -> None:
    code = f"import logging, sys, fp8_ds.log; sys.stdout.close(); {LINES}; print('goes on', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1] == "goes on"
