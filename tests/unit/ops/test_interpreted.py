"""Every Triton kernel in Triton's interpreter against its reference: the files *_interpreted.py, in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreted import run_interpreted

FILES = sorted({*Path(__file__).parents[1].glob("*/*_interpreted.py")} - {Path(__file__)})


def test_kernels_equal_references_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert len(FILES) == 10
    run_interpreted(FILES)


@pytest.mark.slow
def test_kernels_equal_references_for_more_shapes_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(FILES, "-m", "slow")
