"""A checkpoint is complete when its manifest is there: what wrote it, and each file's size and checksum.

How its folder takes its name is folders.py's.

CRC-32 (zlib) detects what disks and networks do to a file, at 3 GB/s on one core (measured; blake2b 0.7, sha256 1.5).
It is no signature: whoever can change a file can change its manifest.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path, PurePath
from typing import Any

from fp8_ds import json_text
from fp8_ds.errors import CheckpointError

MANIFEST = "fp8_ds_manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """One file as it was written, and by which rank."""

    num_bytes: int
    crc32: str
    rank: int


@dataclass(frozen=True)
class Manifest:
    """`header`: what wrote the checkpoint, JSON values by name. `files`: by path relative to the folder."""

    header: dict[str, Any]
    files: dict[str, FileRecord]


def record(path: Path, rank: int) -> FileRecord:
    """Size and checksum of a file that is on the disk afterwards, not only in memory."""
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes, crc32 = _checksum(file)
            os.fsync(file.fileno())
    except OSError as error:  # of a read: it does not say of which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileRecord(num_bytes, crc32, rank)


def _checksum(file: FileIO) -> tuple[int, str]:
    num_bytes, crc = 0, 0
    while chunk := file.read(_CHUNK_BYTES):
        num_bytes += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return num_bytes, f"{crc:08x}"


def damage(folder: Path, name: str, expected: FileRecord) -> str:
    """What is wrong with a file of the manifest; empty if nothing is."""
    path = folder / name
    try:
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected.num_bytes:
            return f"{path} has {size} bytes where {expected.num_bytes} were written"
        with path.open("rb", buffering=0) as file:  # no fsync: read-only file systems may refuse it
            found = _checksum(file)[1]
    except OSError as error:
        return f"{path} cannot be read ([Errno {error.errno}] {error.strerror})"
    return "" if found == expected.crc32 else f"{path} has CRC-32 {found} where {expected.crc32} was written"


def files_in(folder: Path, suffix: str) -> dict[str, int]:
    """Size of every file in `folder` whose name ends so, by path relative to it; through links to folders, once each.

    Raises:
        CheckpointError: one is a pipe, a device or the like, or a folder that DeepSpeed would open as a file.
        OSError: a folder cannot be read, or a file is a link to nothing.
    """

    def fail(error: OSError) -> None:
        raise error

    sizes: dict[str, int] = {}
    seen: set[str] = set()
    for place, names, files in os.walk(folder, followlinks=True, onerror=fail):
        names[:] = [] if os.path.realpath(place) in seen else sorted(names)  # links may lead in circles
        if os.path.realpath(place) not in seen:
            of_patterns = [name for name in names if name.endswith("_states.pt") and Path(place) == folder]
            paths = [Path(place, name) for name in (*files, *of_patterns) if name.endswith(suffix)]
            refuse_special(paths)
            sizes |= {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        seen.add(os.path.realpath(place))
    return sizes


_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def refuse_special(paths: Iterable[Path]) -> None:
    """Check that all `paths` are files, or links to files: a pipe would be waited for, and a device read without end.

    Raises:
        CheckpointError: one is something else.
        FileNotFoundError: one is not there, or a link to nothing.
    """
    for path in paths:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            continue
        kind = next(kind for is_so, kind in _SPECIAL if is_so(mode))
        raise CheckpointError(f"{path}: expected a file, got {kind}. Remove it, or name a folder without it.")


def share_out(sizes: Mapping[str, int], ranks: Collection[int]) -> dict[int, list[str]]:
    """rank -> names of the files that it reads: each file has one rank, and no rank more than the mean and one file.

    The largest go first, each to the rank with the least bytes so far; the same on all ranks.

    Args:
        sizes: bytes by name.
        ranks: that read.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(shares, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(shares, key=lambda rank: (num_bytes[rank], len(shares[rank]), rank))
        shares[rank].append(name)
        num_bytes[rank] += sizes[name]
    return shares


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """`folder` is complete: the manifest is in it, on the disk."""
    write_text(folder / MANIFEST, _text(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`, or None if there is none.

    Raises:
        CheckpointError: it is damaged, or of a newer fp8_ds.
    """
    path = folder / MANIFEST
    try:
        refuse_special([path])
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise _damaged(path) from error
    try:
        content = json_text.parse(text)["content"]
        form, header = content["format"], dict(content["header"])
        if form == _FORMAT:
            manifest = Manifest(header, {name: FileRecord(**entry) for name, entry in content["files"].items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if form != _FORMAT:
        raise CheckpointError(
            f"{path}: expected format {_FORMAT}, got {form!r} of fp8_ds {header.get('fp8_ds')}. Load it with that."
        )
    if text != _text(manifest) or any(map(leads_elsewhere, manifest.files)):
        raise _damaged(path)
    return manifest


def leads_elsewhere(name: Any) -> bool:
    """Whether `folder / name` is not in `folder`. Names in a checkpoint are whatever its sender has written."""
    path = PurePath(name) if isinstance(name, str) else None
    return path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(name)


def refuse_paths(names: Iterable[Any], file: Path) -> None:
    """Check that all `names`, which `file` has, are names within a folder.

    Raises:
        CheckpointError: what is written or read there would be elsewhere.
    """
    for name in filter(leads_elsewhere, names):
        raise CheckpointError(f"{file}: expected names that stay in their folder, got {name!r}. Do not use it.")


def lacks_manifest(folder: Path) -> str:
    """What is wrong with a checkpoint of fp8_ds without one."""
    return (
        f"{folder / MANIFEST} is missing, and the checkpoint is of fp8_ds: its copy is not complete (one from before "
        f"manifests, or changed by hand: `python -m fp8_ds.checkpoint.adopt {folder}` takes its files as they are)"
    )


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected a manifest as it was written, got a damaged one. Load another checkpoint."
    )


def _text(manifest: Manifest) -> str:
    """Canonical, with a checksum of itself: any other byte in it is found."""
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    content = {"format": _FORMAT, "header": manifest.header, "files": files}
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return json.dumps({"crc32": f"{crc:08x}", "content": content}, indent=1, sort_keys=True) + "\n"


def write_text(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before: on the disk, and by a rename."""
    temporary = beside(path, ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # of a write: it does not say of which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    temporary.replace(path)
    sync_folder(path.parent)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def sync_folder(folder: Path) -> None:
    """Renames in `folder` are on the disk. Some network file systems cannot, and need not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def differs(header: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """`key 1 in the checkpoint, 2 now` for each of `keys` that differs; empty if none does."""
    return ", ".join(
        f"{key} {header.get(key)} in the checkpoint, {now[key]} now" for key in keys if header.get(key) != now[key]
    )


def versions() -> dict[str, str]:
    """Of what writes a checkpoint here, for its header."""
    import deepspeed
    import torch

    import fp8_ds

    return {"fp8_ds": fp8_ds.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}
