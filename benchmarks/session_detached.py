"""A session that outlives the call which started it, on a machine that gets the working tree anew with each call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
LOG, ENDED = "session.log", "session.ended"
_STAYS_BEHIND = (".pt", ".lock")
"""Ends of names: what is too large to leave the machine, and what nobody needs."""
_DEVICE_TRACE, _MAX_TRACE_BYTES = "device.json.gz", 8 * 2**20
"""What leaves the machine of folders of traces: rank 0's of the device alone (end_to_end_worker.py), about 2 MB."""
_POLL_SECONDS = 1.0


def detach(arguments: Sequence[str], out: Path, tree: Path = TREE) -> int:
    """Start session.py in a copy of the working tree, in a session of its own.

    A copy, for the next call replaces the tree's files, and what is importing just then finds some missing. Entries of
    PYTHONPATH that lie in the tree point into the copy.

    Args:
        arguments: of session.py, with an absolute --out.
        out: where it writes: LOG and, when it has ended, ENDED.

    Returns:
        Its process.
    """
    copy = Path(tempfile.mkdtemp(prefix="fp8_ds_session_"))
    unwanted = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".whl")
    shutil.copytree(tree, copy, ignore=unwanted, symlinks=True, dirs_exist_ok=True)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    moved = [str(copy / Path(path).relative_to(tree)) if Path(path).is_relative_to(tree) else path for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    (out / ENDED).unlink(missing_ok=True)
    with (out / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(copy / "benchmarks" / "session.py"), *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*moved, str(copy)])},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process.pid


def wait(out: Path, seconds: float) -> bool:
    """Until the detached session has ended, for at most `seconds`; prints the ends of its logs.

    Returns:
        Whether it has ended.

    Raises:
        FileNotFoundError: none was started with this folder, as on a machine that has taken the place of a lost one.
    """
    if not ((out / LOG).exists() or (out / ENDED).exists()):
        raise FileNotFoundError(f"expected a detached session in {out}, got none: is this another machine?")
    end = time.monotonic() + seconds
    while not (ended := (out / ENDED).exists()) and time.monotonic() < end:
        time.sleep(min(_POLL_SECONDS, seconds))
    for log, lines in ((out / LOG, 40), *((path, 3) for path in sorted((out / "logs").glob("*.txt")))):
        if log.exists():
            print("\n".join([f"## {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]]))
    print("ended" if ended else "still running", flush=True)
    return ended


def _travels(trace: Path) -> bool:
    return trace.name == _DEVICE_TRACE and trace.stat().st_size < _MAX_TRACE_BYTES


def archive(out: Path, file: Path) -> None:
    """All of `out` as one .tgz, but for checkpoints and traces other than small ones of the device alone.

    Few files leave a machine, and no large ones.
    """
    with tarfile.open(file, "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            name = path.relative_to(out)
            if path.is_file() and path.suffix not in _STAYS_BEHIND and ("traces" not in name.parts or _travels(path)):
                tar.add(path, arcname=str(Path(out.name) / name))
