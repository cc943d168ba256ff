"""FP8 against stock bf16 on the demo model. Minutes on CPU: slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.timeout(3000)
def test_held_out_loss_is_within_half_a_percent_of_bf16(
    root: Path, tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    command = [sys.executable, str(root / "benchmarks/demo_parity.py"), "--steps", "100", "--ranks", "2"]
    subprocess.run([*command, "--out", str(tmp_path)], env=cpu_environment, check=True)
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert len(result["relative_difference"]) == 3
    assert abs(result["mean_relative_difference"]) < 0.005, result["held_out"]
