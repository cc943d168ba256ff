"""Hosts: two network namespaces joined by a veth pair, and commands that run in them as if on two machines.

They share files and CPU cores, but no network: each has its own address, its own loopback, and the cable between. The
cable counts bytes, can be cut, and can be slow. Needs root and iproute2; the machine's own network is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TAIL = 4000

# Reads until its standard input ends, which it does when the process that made the hosts closes it or dies of anything.
_REAPER = """
read -r _
for host in "$@"; do
    for _ in 1 2 3 4 5; do
        pids=$(ip netns pids "$host" 2>/dev/null)
        [ -n "$pids" ] || break
        kill -9 $pids 2>/dev/null
        sleep 0.1
    done
    ip netns del "$host" 2>/dev/null
done
"""


def why_not() -> str:
    """What hosts need and this machine lacks; empty if nothing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"expected iproute2, found no {' and no '.join(missing)}: apt-get install iproute2"
    if os.geteuid() != 0:
        return f"expected root, which makes network namespaces, got user {os.geteuid()}: run it by sudo"
    name = f"fp8ds-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], stdout=-1, stderr=-2, text=True, check=False)
    if probe.returncode:
        return f"expected to make a network namespace, got: {probe.stdout.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def cable_bytes(interface: str = INTERFACE) -> int:
    """Sent and received by this host so far; 0 without such an interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    return 0


def _run(*command: str) -> str:
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True, check=False, timeout=30)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {result.returncode}: {result.stdout.strip()}")
    return result.stdout


class HostsError(AssertionError):
    """A command failed or ran past its deadline; the message holds the ends of all outputs."""


@dataclass
class Finished:
    """What a run left: exit status by host, all output by host, and by rank where the launcher keeps that apart."""

    exits: dict[int, int | None]
    by_host: dict[int, str]
    by_rank: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return all(status == 0 for status in self.exits.values())

    def describe(self) -> str:
        """The end of each output, under its host or rank and exit status."""
        parts = [f"--- host {host}: exit {self.exits[host]}\n{text[-_TAIL:]}" for host, text in self.by_host.items()]
        parts += [f"--- rank {rank}\n{text[-_TAIL:]}" for rank, text in sorted(self.by_rank.items())]
        return "\n".join([f"after {self.seconds:.0f} s", *parts])


class Hosts:
    """Two hosts, up and joined, until `close`, or until this process is gone, however it ends.

    Args:
        folder: for outputs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unique = f"{os.getpid()}-{time.monotonic_ns() % 1_000_000_000}"
        self.names = tuple(f"fp8ds-{unique}-{letter}" for letter in "ab")
        self._reaper = subprocess.Popen(
            ["sh", "-c", _REAPER, "reaper", *self.names], stdin=subprocess.PIPE, start_new_session=True
        )
        self._daemons: dict[int, subprocess.Popen[str]] = {}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        ours, theirs = self.names
        # Both ends are made where they belong: at no time does the machine's own network see them.
        _run(*["ip", "link", "add", "eth0", "netns"], ours, *["type", "veth", "peer", "name", "eth0", "netns"], theirs)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")

    def close(self) -> None:
        """End everything that runs in the hosts, and the hosts."""
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            self._reaper.stdin.close()
        self._reaper.wait(timeout=30)

    # --- the cable ---

    def num_bytes(self, host: int) -> tuple[int, int]:
        """(received, sent) over the cable by `host` since it exists, with headers of Ethernet, IP and TCP."""
        stats = json.loads(_run("ip", "-j", "-s", "-n", self.names[host], "link", "show", INTERFACE))[0]["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]

    def limit(self, mbit: float | None) -> None:
        """Each direction carries at most `mbit` Mbit/s; None: what the machine can."""
        for name in self.names:
            if mbit is None:
                subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root"], stderr=-3, check=False)
            else:
                shape = f"rate {mbit}mbit burst 64kb latency 400ms".split()
                _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *shape)

    def why_no_netem(self) -> str:
        """What `disturb` needs and this kernel lacks; empty if nothing."""
        name = self.names[0]
        probe = subprocess.run(
            ["tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms"],
            stdout=-1, stderr=-2, text=True, check=False,
        )  # fmt: skip
        if probe.returncode:
            return f"expected a kernel with netem (CONFIG_NET_SCH_NETEM), got: {probe.stdout.strip()}"
        _run("tc", "-n", name, "qdisc", "del", "dev", "lo", "root")
        return ""

    def disturb(self, delay_ms: float, loss_percent: float) -> None:
        """Each direction delivers `delay_ms` later, and loses that share of all packets, until `limit(None)`."""
        for name in self.names:
            fate = f"delay {delay_ms}ms loss {loss_percent}%".split()
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "netem", *fate)

    def num_dropped(self, host: int) -> int:
        """Packets that `host` did not send because of `limit` or `disturb`, since that call."""
        found = json.loads(_run("tc", "-j", "-s", "-n", self.names[host], "qdisc", "show", "dev", INTERFACE))
        return int(found[0]["drops"])

    def link(self, is_up: bool) -> None:
        """The cable is in, or cut. Connections survive a short cut."""
        _run("ip", "-n", self.names[0], "link", "set", INTERFACE, "up" if is_up else "down")

    # --- processes ---

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *argv]

    def pids(self, host: int) -> list[int]:
        """Of all processes in `host` but those that `serve` started."""
        found = [int(pid) for pid in _run("ip", "netns", "pids", self.names[host]).split()]
        return [pid for pid in found if pid not in self._daemons]

    def kill(self, kill_signal: int = signal.SIGKILL) -> None:
        """No process is left in the hosts but those that `serve` started."""
        for _ in range(50):
            pids = [pid for host in range(len(self.names)) for pid in self.pids(host)]
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, kill_signal)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        raise HostsError(f"processes {pids} outlive signal {kill_signal}")

    def serve(self, host: int, argv: Sequence[str]) -> None:
        """`argv` runs in `host` until the hosts are closed."""
        log = (self.folder / f"daemon{host}.log").open("w")
        process = subprocess.Popen(self.command(host, argv), stdout=log, stderr=log, text=True, start_new_session=True)
        log.close()
        self._daemons[process.pid] = process

    def run(
        self,
        commands: Mapping[int, Sequence[str]],
        env: Mapping[str, str],
        timeout: float = 240.0,
        grace: float = 30.0,
        cwd: Path | None = None,
        rank_logs: Callable[[], dict[int, Path]] = dict,
        meanwhile: Callable[[], None] | None = None,
        check: bool = True,
    ) -> Finished:
        """Run one command in each host given, at the same time; nothing that they started is left afterwards.

        Args:
            commands: host to argv, each in a session of its own.
            env: all of their environment.
            timeout: seconds for all of them.
            grace: seconds that the others have after the first that failed.
            cwd: of all commands; None: a new folder.
            rank_logs: asked at the end for files of ranks' output.
            meanwhile: called about ten times a second as long as any of them runs (faults are made here).
            check: raise if a command fails.

        Raises:
            HostsError: a command failed (if `check`), or was killed at a deadline.
        """
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        logs = {host: folder / f"host{host}.log" for host in commands}
        running: dict[int, subprocess.Popen[bytes]] = {}
        deadline, is_late = start + timeout, False
        try:
            for host, argv in commands.items():
                with logs[host].open("wb") as log:
                    running[host] = subprocess.Popen(
                        self.command(host, argv), stdout=log, stderr=log, stdin=-3, env=dict(env), cwd=cwd or folder,
                        start_new_session=True,
                    )  # fmt: skip
            while None in (polled := [process.poll() for process in running.values()]):
                if any(polled):
                    deadline = min(deadline, time.monotonic() + grace)
                    grace = timeout  # counts from the first failure
                is_late = time.monotonic() > deadline
                if is_late:
                    break
                if meanwhile is not None:
                    meanwhile()
                time.sleep(0.1)
        finally:
            exits = {host: process.poll() for host, process in running.items()}
            self.kill()
            for process in running.values():
                process.wait()
        finished = Finished(
            exits,
            {host: log.read_text(errors="replace") for host, log in logs.items()},
            {rank: path.read_text(errors="replace") for rank, path in rank_logs().items()},
            time.monotonic() - start,
        )
        if is_late or (check and not finished.is_good):
            what = "killed at the deadline" if is_late else "a command failed"
            raise HostsError(f"{what}; {dict(commands)}\n{finished.describe()}")
        return finished
