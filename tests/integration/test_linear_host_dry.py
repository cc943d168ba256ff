"""linear_host.py on CPU, with the stand-in for Triton's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import HANG

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_linear_is_timed_beside_one_in_bf16(tmp_path: Path) -> None:
    """In a process of its own: the driver is set for good there."""
    few = "linear_host.NUM_CALLS = 3"
    command = [sys.executable, "-c", f"import linear_host; {few}; linear_host.main()", "--out", str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    subprocess.run(command, env=env, timeout=HANG, check=True, stdout=-3)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert [(row["recipe"], row["one_thread"]) for row in found["rows"]] == [
        ("tensorwise", False),
        ("tensorwise", True),
    ]
    for row in found["rows"]:
        assert all(row[way][f"{part}_us"] > 0 for way in ("fp8", "bf16") for part in ("forward", "backward", "host"))
        assert row["ratio"] == round(row["fp8"]["host_us"] / row["bf16"]["host_us"], 2)
