"""A study's folder as one file, to go on with on another machine."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile

from fp8_ds.errors import ConfigError


def pack(folder: Path, file: Path, keep: Callable[[Path], bool] = lambda path: True) -> int:
    """All files of the folder are in `file`, a tar; it is whole or as it was.

    Args:
        folder: of the study.
        file: outside the folder.
        keep: of a path relative to the folder.

    Returns:
        Its bytes.
    """
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w") as tar:
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if path.is_file() and keep(relative):
                tar.add(path, arcname=str(relative))
    os.replace(part, file)
    return file.stat().st_size


def refuse_unwritable(file: Path) -> None:
    """Nothing happens, and nothing is left, if `pack` can write `file`, as far as that is known before it does.

    Raises:
        OSError: it is a folder, or its folder is not there or cannot be written.
    """
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    with TemporaryFile(dir=file.absolute().parent):
        pass


def unpack(file: Path, folder: Path) -> None:
    """The folder is as it was at `pack`; what it had already is overwritten.

    Raises:
        ConfigError: the file is no such archive.
        OSError: it cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar.getmembers():
                path = PurePosixPath(member.name)
                if not member.isfile() or path.is_absolute() or ".." in path.parts:
                    raise tarfile.TarError(f"{member.name} in it is no file of a study")
            if hasattr(tarfile, "data_filter"):  # since Python 3.10.12 and 3.11.4
                tar.extractall(folder, filter="data")
            else:
                tar.extractall(folder)
    except tarfile.TarError as error:
        raise ConfigError(
            f"--archive: expected a file of an earlier call, got {file} ({error}). Name another."
        ) from error
