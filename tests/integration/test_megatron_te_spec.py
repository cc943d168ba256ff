"""Checkpoints between Megatron's spec of Transformer Engine, ours over it, and ours without it.

Transformer Engine is not on the machines where these run: te_spec_checkpoints.py says what stands in for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import HANG

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")


@pytest.mark.slow
def test_a_checkpoint_of_the_stock_te_spec_loads_into_ours_and_back(root: Path, tmp_path: Path) -> None:
    """Keys, shapes, offsets and writers are the same, and all four ways of loading give the same parameters."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        # Megatron sets these in its own process, and refuses to start where they are set.
        **{name: value for name, value in os.environ.items() if not name.startswith("NVTE_")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(root), str(root / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    script = Path(__file__).with_name("te_spec_checkpoints.py")
    run = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("same parameters") == 4
