"""Every Triton kernel against its reference: tests/gpu/kernels in Triton's interpreter, in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreted import run_interpreted

KERNELS = Path(__file__).parents[2] / "gpu/kernels"


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_equal_references_in_the_interpreter(which: str) -> None:
    pytest.importorskip("triton")
    status, output = run_interpreted(sorted(KERNELS.glob("test_*.py")), "-m", which)
    assert status == 0 and " passed" in output and "skipped" not in output, output[-6000:]
