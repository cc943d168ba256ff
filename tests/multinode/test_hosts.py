"""The hosts themselves: the cable counts, slows and breaks; nothing is left of what ran in them, nor of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import ADDRESSES, Hosts, HostsError
from launchers import environment

pytestmark = pytest.mark.multinode

MEGABYTE = 1_000_000
RECEIVE = f"""
import socket, time
listener = socket.create_server(("{ADDRESSES[0]}", 5000))
peer, start, total = listener.accept()[0], time.monotonic(), 0
while data := peer.recv(1 << 16):
    total += len(data)
print(total, time.monotonic() - start)
"""
SEND = f"""
import socket, time
for _ in range(100):
    try:
        peer = socket.create_connection(("{ADDRESSES[0]}", 5000), timeout=20)
        break
    except OSError:
        time.sleep(0.05)
peer.sendall(bytes({MEGABYTE}))
"""


def transfer(hosts: Hosts) -> tuple[int, float]:
    """(bytes that the first host received, seconds)."""
    commands = {0: [sys.executable, "-c", RECEIVE], 1: [sys.executable, "-c", SEND]}
    total, seconds = hosts.run(commands, environment(), timeout=30).by_host[0].split()
    return int(total), float(seconds)


def test_the_cable_counts_what_crosses_it(hosts: Hosts) -> None:
    before = hosts.num_bytes(0), hosts.num_bytes(1)
    assert transfer(hosts)[0] == MEGABYTE
    received, sent = (now - then for now, then in zip(hosts.num_bytes(0), before[0], strict=True))
    assert MEGABYTE <= received <= 1.03 * MEGABYTE
    assert sent <= 0.02 * MEGABYTE
    assert hosts.num_bytes(1)[1] - before[1][1] == pytest.approx(received, rel=0.01)


def test_a_limit_holds_and_is_lifted(hosts: Hosts) -> None:
    hosts.limit(16)
    try:
        _, seconds = transfer(hosts)
    finally:
        hosts.limit(None)
    assert 0.8 * 8 / 16 <= seconds <= 2 * 8 / 16
    assert transfer(hosts)[1] < 0.25


def test_nothing_crosses_a_cut_cable_until_it_is_in_again(hosts: Hosts) -> None:
    hosts.link(False)
    with pytest.raises(HostsError, match="killed at the deadline"):
        hosts.run({0: [sys.executable, "-c", RECEIVE], 1: [sys.executable, "-c", SEND]}, environment(), timeout=2)
    hosts.link(True)
    assert transfer(hosts)[0] == MEGABYTE


def test_nothing_is_left_of_a_run(hosts: Hosts) -> None:
    escapes = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); raise SystemExit(3)"
    finished = hosts.run({1: [sys.executable, "-c", escapes]}, environment(), timeout=20, check=False)
    assert finished.exits == {1: 3}
    assert hosts.pids(0) == hosts.pids(1) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_are_given_grace_after_the_first_failure_and_no_more(hosts: Hosts, failing: int) -> None:
    fails, waits = [sys.executable, "-c", "raise SystemExit(3)"], ["sleep", "60"]
    commands = {host: fails if host == failing else waits for host in range(2)}
    start = time.monotonic()
    with pytest.raises(HostsError, match="exit 3"):
        hosts.run(commands, environment(), timeout=30, grace=0.5)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("end", ["hosts.close()", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_hosts_are_gone_with_the_process_that_made_them(hosts: Hosts, tmp_path: Path, end: str) -> None:
    script = f"""
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from hosts import Hosts
hosts = Hosts(Path({str(tmp_path)!r}))
hosts.serve(0, ["sleep", "60"])
print(" ".join(hosts.names), flush=True)
{end}
"""
    made = subprocess.run([sys.executable, "-c", script], stdout=-1, stderr=-3, text=True, timeout=30, check=False)
    names = made.stdout.split()
    assert len(names) == 2
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/run/netns/{name}") for name in names):
        assert time.monotonic() < deadline, "network namespaces are left"
        time.sleep(0.1)
