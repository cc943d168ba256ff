"""What several test folders share: the place of the repository, ranks started for a script, and which tests share a
process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import HANG
from support.scripts import start_script

from fp8_ds.host import free_port
from fp8_ds.tools.doctor.diagnosis import abandoned, build_root

# Before any test imports deepspeed, whose choice of accelerator is final.
if os.environ.get("FP8_DS_TEST_DEVICE") != "cuda":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's op for a CPU is here (tests/build_op.py), not where a killed build of others may have left its lock.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".out" / "torch_extensions"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
OWN_RANKS = [
    f"tests/distributed/test_{name}.py"
    for name in ("faults", "checkpoint_kills", "checkpoint_wait", "many_ranks", "ranks")
]


def pytest_configure(config: pytest.Config) -> None:
    """Before any worker starts: a lock that an earlier run of these tests has left would stop all that launch."""
    if not hasattr(config, "workerinput"):
        remove_shared_memory(seconds=60)
        if "TORCH_EXTENSIONS_DIR" in os.environ:
            for lock in abandoned(build_root()):
                lock.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="module")
def no_shared_memory_left() -> Iterator[None]:
    yield
    remove_shared_memory(seconds=60)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `-n`, a file's tests share a process, and so do all files that need the pool of ranks: one core is theirs,
    the other that of all others, among them the files whose ranks die and so are their own. `--dist worksteal` gives
    each process single tests instead."""
    if config.option.dist == "worksteal":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesAndRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if file.startswith("tests/distributed/") and file not in OWN_RANKS else file

    config.option.loadscopereorder = False  # as collected: the long files, those with ranks and launchers, come first
    return FilesAndRanks(config, log)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that asks for no seed draws the same numbers whatever has run before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture
def cpu_environment() -> dict[str, str]:
    """os.environ for a launcher on CPU, where `ninja` and this checkout are found.

    On a machine with GPUs DeepSpeed's launcher shows them to its ranks again, and Accelerate takes one unless it is
    told. ACCELERATE_USE_CPU is not the way: with it Accelerate leaves DeepSpeed out (1.15.0, state.py line 974).
    """
    env = dict(os.environ, DS_ACCELERATOR="cpu", ACCELERATE_TORCH_DEVICE="cpu", OMP_NUM_THREADS="1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    ours = (str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"))  # as pyproject.toml has it for this process
    env["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [env.get("PYTHONPATH")])])
    return env


@pytest.fixture
def start_ranks(tmp_path: Path, cpu_environment: dict[str, str]) -> Callable[..., str]:
    """start_ranks(script, *arguments, ranks=2, module=False) -> all output, one rank's after another; fails with it.

    Ranks are started as DeepSpeed's launcher would, whose own two processes import torch and DeepSpeed too, half of
    what a start costs. `forks`: from a process that has imported both.
    """

    def run(
        script: Path | str,
        *arguments: object,
        ranks: int = 2,
        module: bool = False,
        forks: bool = False,
        timeout: float = HANG,
    ) -> str:
        port, deadline = free_port(), time.monotonic() + timeout
        env = {**cpu_environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        started: list[Any] = []

        def status(process: Any) -> int | None:
            found: int | None = process.exitcode if forks else process.poll()
            return found

        logs = [tmp_path / f"rank{rank}-{port}.log" for rank in range(ranks)]
        for rank, log in enumerate(logs):
            command = [sys.executable, *(["-m"] if module else []), script, f"--local_rank={rank}", *arguments]
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if forks:
                started.append(start_script(script, command[2:], env, log, tmp_path))
                continue
            with log.open("w") as file:
                started.append(subprocess.Popen([*map(str, command)], stdout=file, stderr=-2, env=env, cwd=tmp_path))
        try:
            # Where one has failed, the others would wait for it.
            while {status(process) for process in started} in ({None}, {None, 0}) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for process in started:
                process.kill()
                process.join() if forks else process.wait()
            remove_shared_memory(port)
        outputs = [log.read_text() for log in logs]
        failed = [output[-6000:] for process, output in zip(started, outputs, strict=True) if status(process)]
        assert not failed, "\n".join(failed)
        return "\n".join(outputs)

    return run


def remove_shared_memory(port: int | None = None, seconds: float = 0.0) -> None:
    """Remove the files that DeepSpeed's CPU ranks leave behind at their end, 66 MiB of memory each.

    Args:
        port: of the ranks, all of which have ended; None: of any ranks that have ended.
        seconds: age from which on a file that no process has mapped is taken for left behind.
    """
    found = set(Path("/dev/shm").glob(f"deepspeed_*_{'*' if port is None else port}_*"))
    if not found:
        return
    in_use = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended, or is another user's, whose files cannot be removed either
            in_use += "".join(line for line in maps.read_text().splitlines() if "/dev/shm/deepspeed_" in line)
    for file in found:
        with suppress(OSError):
            if str(file) not in in_use and time.time() - file.stat().st_mtime >= seconds:
                file.unlink()
