"""The command lines of real launchers over two hosts, and one call that runs a script under one of them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import ADDRESSES, INTERFACE, Finished, Hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = 29777
"""Of rank 0, in a namespace of its own: nobody else's."""
Commands = dict[int, list[str]]


def environment() -> dict[str, str]:
    """For launchers on CPU: this checkout is found, and gloo talks over the cable."""
    env = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=INTERFACE)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *filter(None, [env.get("PYTHONPATH")])])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def _deepspeed(folder: Path, ranks_per_host: int, num_hosts: int, *options: str) -> list[str]:
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{address} slots={ranks_per_host}\n" for address in ADDRESSES[:num_hosts]))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    command += ["--master_addr", ADDRESSES[0], "--master_port", str(PORT)]
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)  # hosts share a disk here, and launchers that make it at one instant fail
    return [*command, "--enable_each_rank_log", str(ranks), *options]


def no_ssh(folder: Path, ranks_per_host: int, num_hosts: int) -> Commands:
    """`deepspeed --hostfile H --no_ssh --node_rank k` on each host."""
    return {
        host: _deepspeed(folder, ranks_per_host, num_hosts, "--no_ssh", "--node_rank", str(host))
        for host in range(num_hosts)
    }


def pdsh(folder: Path, ranks_per_host: int, num_hosts: int) -> Commands:
    """`deepspeed --hostfile H` on the first host, which reaches all of them by pdsh and ssh.

    Environment travels as DeepSpeed documents it: by a file .deepspeed_env where the launcher is started.
    """
    names = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PATH")
    known = environment()
    (folder / ".deepspeed_env").write_text("".join(f"{name}={known[name]}\n" for name in names))
    return {0: _deepspeed(folder, ranks_per_host, num_hosts)}


def torchrun(folder: Path, ranks_per_host: int, num_hosts: int) -> Commands:
    """`torchrun --nnodes N --node_rank k` on each host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_hosts)]
    command += ["--nproc_per_node", str(ranks_per_host), "--master_addr", ADDRESSES[0], "--master_port", str(PORT)]
    return {
        host: [*command, "--node_rank", str(host), "--redirects", "3", "--log_dir", str(folder / f"ranks{host}")]
        for host in range(num_hosts)
    }


LAUNCHERS = {"no_ssh": no_ssh, "pdsh": pdsh, "torchrun": torchrun}


def _rank_logs(folder: Path, ranks_per_host: int) -> dict[int, Path]:
    """The files that the launchers above keep for each rank."""
    found = {}
    for path in folder.glob("ranks*/**/*.log"):
        if match := re.search(r"_rank(\d+)\.log$", path.name):  # deepspeed
            found[int(match[1])] = path
        elif match := re.search(r"ranks(\d+)/.*/(\d+)/stderr\.log$", str(path)):  # torchrun
            found[int(match[1]) * ranks_per_host + int(match[2])] = path
    return found


def launch(
    hosts: Hosts,
    launcher: str,
    script: Path,
    *arguments: object,
    ranks_per_host: int = 1,
    num_hosts: int = 2,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Finished:
    """Run `script` as ranks_per_host * num_hosts ranks; `options` go to `Hosts.run`."""
    folder = Path(tempfile.mkdtemp(prefix=f"{launcher}-", dir=hosts.folder))
    tail: Sequence[str] = [str(script), *map(str, arguments)]
    commands = LAUNCHERS[launcher](folder, ranks_per_host, num_hosts)
    return hosts.run(
        {host: [*command, *tail] for host, command in commands.items()},
        {**environment(), **(env or {})},
        cwd=folder,
        rank_logs=lambda: _rank_logs(folder, ranks_per_host),
        **options,
    )
