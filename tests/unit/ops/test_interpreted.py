"""Every Triton kernel against its reference: tests/gpu/kernels in Triton's interpreter, in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreted import run_interpreted

KERNELS = Path(__file__).parents[2] / "gpu/kernels"


def test_kernels_equal_references_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(sorted(KERNELS.glob("test_*.py")), "-m", "not slow")
