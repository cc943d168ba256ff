"""The cable is cut in the middle of training: for seconds, and for good."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from launchers import launch
from test_two_hosts import assert_trained_alike, zero_case

pytestmark = [pytest.mark.multinode, pytest.mark.launcher]

GROUP_TIMEOUT, MARGIN = 60, 30
CASE = {**zero_case(3, {}), "steps": 40}


class Cutter:
    """Cuts the cable in the middle of CASE; called ten times a second. `seconds`: until it is in again."""

    def __init__(self, hosts: Hosts, whole: Any, seconds: float) -> None:
        self.hosts = hosts
        self.seconds = seconds
        self.half = whole[CASE["name"]][0]["cable"] // 2
        self.start = sum(hosts.num_bytes(0))
        self.cut_at: float | None = None
        self.is_in_again = False

    def __call__(self) -> None:
        if self.cut_at is None:
            if sum(self.hosts.num_bytes(0)) - self.start > self.half:
                self.hosts.link(False)
                self.cut_at = time.monotonic()
        elif not self.is_in_again and time.monotonic() - self.cut_at > self.seconds:
            self.hosts.link(True)
            self.is_in_again = True


def test_a_link_that_is_down_for_seconds_changes_no_result(train: Callable[..., Any], hosts: Hosts) -> None:
    whole = train([CASE])
    cutter = Cutter(hosts, whole, seconds=5)
    try:
        cut = train([CASE], anew=True, meanwhile=cutter)
    finally:
        hosts.link(True)
    assert cutter.is_in_again
    assert_trained_alike(cut, whole, [CASE["name"]])
    assert max(cut[CASE["name"]][0]["seconds"]) > 4.5  # a step waited


def test_a_link_that_stays_down_ends_both_hosts_with_an_error(train: Callable[..., Any], hosts: Hosts) -> None:
    script, folder = Path(__file__).with_name("train_cases.py"), hosts.folder / "cut"
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps([CASE]))
    cutter = Cutter(hosts, train([CASE]), seconds=1e9)
    ended: dict[str, float] = {}

    def watch() -> None:
        cutter()
        ended["at"] = time.monotonic()

    try:
        finished = launch(
            hosts, "no_ssh", script, "--cases", folder / "cases.json", "--out", folder,
            env={"DEEPSPEED_TIMEOUT": str(GROUP_TIMEOUT // 60)}, timeout=500, grace=GROUP_TIMEOUT + MARGIN,
            meanwhile=watch,
            check=False,
        )  # fmt: skip
    finally:
        hosts.link(True)
    assert cutter.cut_at is not None
    assert ended["at"] - cutter.cut_at < GROUP_TIMEOUT + MARGIN
    assert all(status != 0 for status in finished.exits.values()), finished.describe()
    assert sorted(finished.by_rank) == [0, 1]
    for text in finished.by_rank.values():
        assert "Traceback" in text and "Error: " in text, finished.describe()
