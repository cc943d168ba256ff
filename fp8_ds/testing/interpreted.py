"""Kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fp8_ds.testing import HANG


def run_interpreted(tests: Path, *more: str) -> None:
    """All tests of a file pass where Triton interprets; it decides so at its import, and the caller may have done that.

    None of the caller's plugins that would write reports or need its options take part.

    Args:
        tests: the file.
        more: options of pytest.

    Raises:
        AssertionError: one fails or is skipped, or there is none; with the end of the output.
    """
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *more, str(tests)]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False)
    if result.returncode or " passed" not in result.stdout or "skipped" in result.stdout:
        raise AssertionError(result.stdout[-6000:])
