"""A study's folder: it belongs to one call at a time, and what a later call reads there is whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp8_ds.errors import ConfigError

_LOCK = "lock"


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """No other call has the folder meanwhile: two would append to the same logs and save into the same state.

    Gives:
        The file descriptor that holds it. A process that inherits it holds the folder as well: a run that goes on after
        its call was killed.

    Args:
        folder: made where it is missing, and removed again if nothing came into it. On a file system without locks
            nothing is held.

    Raises:
        ConfigError: another call, or a run of one, has it.
        OSError: it cannot be written.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--out: expected a folder that no other call works in, got {folder}. Wait until that one, or the run "
                "that it has left if it was killed, is at its end; or name another folder."
            ) from error
        except OSError:
            pass  # the file system has no locks
        try:
            yield file.fileno()
        finally:
            with suppress(OSError):
                if is_new and [path.name for path in folder.iterdir()] == [_LOCK]:
                    (folder / _LOCK).unlink()
                    folder.rmdir()


def write_whole(path: Path, text: str) -> None:
    """The file has the text, or is as it was: a full disk or a kill leaves no half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
