"""launch_host.py on CPU, with the stand-in for Triton's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fp8_ds.testing import HANG

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_is_timed_both_ways(tmp_path: Path) -> None:
    """In a process of its own: the driver is set for good there."""
    short = "import launch_host; launch_host.NUM_SAMPLES, launch_host.NUM_CALLS = 1, 3; launch_host.main()"
    command = [sys.executable, "-c", short, "--out", str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    subprocess.run(command, env=env, timeout=HANG, check=True, stdout=-3)
    (path,) = tmp_path.glob("*-launch-host.json")
    rows = json.loads(path.read_text())["microseconds"]
    assert len(rows) == 7
    assert all(set(row) == {"triton", "launch"} and min(row.values()) > 0 for row in rows.values())
    assert "| transpose |" in path.with_suffix(".md").read_text()
