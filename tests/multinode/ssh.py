"""A real sshd in each host, with keys of its own in a temporary folder. Nobody's ~/.ssh is read or written."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from hosts import ADDRESSES, Hosts, HostsError

SSHD = "/usr/sbin/sshd"

_SERVER = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking accept-new
    BatchMode yes
    LogLevel ERROR
"""


def why_not() -> str:
    """What the ssh path needs and this machine lacks; empty if nothing."""
    missing = [tool for tool in (SSHD, "ssh", "ssh-keygen", "pdsh") if shutil.which(tool) is None]
    return f"expected sshd and pdsh, found no {', '.join(missing)}: tests/multinode/install_tools.sh" if missing else ""


def serve(hosts: Hosts) -> dict[str, str]:
    """An sshd answers in each host until the hosts are closed; returns what a launcher's environment needs.

    The launcher and pdsh call `ssh` with options of their own, so a wrapper of that name adds our configuration.
    """
    folder = hosts.folder / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    client = folder / "client_config"
    client.write_text(_CLIENT.format(folder=folder))
    wrapper = folder / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it for its unprivileged half
    for host, address in enumerate(ADDRESSES):
        server = folder / f"server_config{host}"
        server.write_text(_SERVER.format(address=address, folder=folder))
        hosts.serve(host, [SSHD, "-D", "-e", "-f", str(server)])
    for address in ADDRESSES:
        _wait_for(hosts, [str(wrapper), address, "true"])
    return {"PATH": os.pathsep.join([str(wrapper.parent), os.environ["PATH"]])}


def _wait_for(hosts: Hosts, argv: list[str], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = subprocess.run(hosts.command(0, argv), stdout=-1, stderr=-2, text=True, check=False, timeout=seconds)
        if result.returncode == 0:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in hosts.folder.glob("daemon*.log"))
            raise HostsError(f"{' '.join(argv)}: {result.stdout}\n{logs}")
        time.sleep(0.2)
