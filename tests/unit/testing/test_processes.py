"""What hangs is ended with all that it has started, what ends is left alone, and ranks leave with status 0."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ENDED, run_or_end
from support import HANG


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_status_is_that_of_the_command(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output.open("w") as stdout:
        command = ["sh", "-c", 'echo "$GREETING"; exit 3']
        assert run_or_end(command, HANG, stdout=stdout, env={**os.environ, "GREETING": "good day"}) == 3
    assert output.read_text() == "good day\n"


@pytest.mark.parametrize("deaf", ["", "trap '' TERM; "], ids=["ends when asked", "deaf"])
def test_what_hangs_is_ended_with_its_children(tmp_path: Path, deaf: str) -> None:
    pid = tmp_path / "pid"
    with pid.open("w") as stdout:
        assert run_or_end(["sh", "-c", f"{deaf}sleep 600 & echo $!; wait"], 2.0, grace=1.0, stdout=stdout) == ENDED
    assert_gone(int(pid.read_text()))


LAUNCHER = "setsid sleep 600 & rank=$!; trap 'kill $rank; exit 1' TERM; echo $rank; wait"


def test_a_launcher_may_end_the_ranks_that_only_it_knows(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pid.open("w") as stdout:
        assert run_or_end(["sh", "-c", LAUNCHER], 2.0, grace=HANG, stdout=stdout) == ENDED
    assert_gone(int(pid.read_text()))


GLOO = """
import atexit
import torch
import torch.distributed as dist
from processes import leave
atexit.register(print, "Python's own way out")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(160):
    dist.all_reduce(torch.ones(1000), async_op=True)  # threads of gloo's let go of the tensors
print("done")
leave()
"""


def test_a_rank_leaves_with_its_output_written_and_not_by_pythons_own_way_out() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "benchmarks")}
    run = subprocess.run([sys.executable, "-c", GLOO], capture_output=True, text=True, timeout=HANG, env=env)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
