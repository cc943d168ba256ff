"""A checkpoint is complete when its manifest is there: what wrote it, and each file's size and checksum.

Files are written into `TAG.incomplete`. The manifest is the last of them; then the folder takes its name by a rename,
and then the file `latest`. So a kill at any moment leaves either the checkpoint before or the new one, and a folder
without manifest under a name that says so. Saving a tag again keeps the old one as `TAG.replaced` until the new one
has its name.

CRC-32 (zlib) detects what disks and networks do to a file, at 3 GB/s on one core (measured; blake2b 0.7, sha256 1.5).
It is no signature: whoever can change a file can change its manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from fp8_ds.errors import CheckpointError

MANIFEST = "fp8_ds_manifest.json"
INCOMPLETE, REPLACED = ".incomplete", ".replaced"
LATEST = "latest"
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
    with path.open("rb", buffering=0) as file:
        num_bytes, crc32 = _checksum(file)
        os.fsync(file.fileno())
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
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != expected.num_bytes:
        return f"{path} has {size} bytes where {expected.num_bytes} were written"
    with path.open("rb", buffering=0) as file:  # no fsync: read-only file systems may refuse it
        found = _checksum(file)[1]
    return "" if found == expected.crc32 else f"{path} has CRC-32 {found} where {expected.crc32} was written"


def share_out(files: Mapping[str, FileRecord], ranks: Collection[int]) -> dict[int, list[str]]:
    """rank -> names of the files that it reads: each file has one rank, and no rank more than the mean and one file.

    The largest go first, each to the rank with the least bytes so far; the same on all ranks.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    num_bytes = dict.fromkeys(shares, 0)
    for name in sorted(files, key=lambda name: (-files[name].num_bytes, name)):
        rank = min(shares, key=lambda rank: (num_bytes[rank], len(shares[rank]), rank))
        shares[rank].append(name)
        num_bytes[rank] += files[name].num_bytes
    return shares


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """`folder` is complete: the manifest is in it, on the disk."""
    _write(folder / MANIFEST, _text(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`, or None if there is none.

    Raises:
        CheckpointError: it is damaged, or of a newer fp8_ds.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise _damaged(path) from error
    try:
        content = json.loads(text)["content"]
        form, header = content["format"], dict(content["header"])
        if form == _FORMAT:
            manifest = Manifest(header, {name: FileRecord(**entry) for name, entry in content["files"].items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if form != _FORMAT:
        raise CheckpointError(
            f"{path}: expected format {_FORMAT}, got {form!r} of fp8_ds {header.get('fp8_ds')}. Load it with that."
        )
    if text != _text(manifest) or any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest.files):
        raise _damaged(path)
    return manifest


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


# --- folders ---


def prepare(save_dir: Path, tag: str) -> None:
    """What an earlier save of `tag` left behind, killed half-way, is gone; a complete one has its name.

    Raises:
        CheckpointError: such files cannot be removed, and would be taken for the new checkpoint's.
    """
    folder = save_dir / tag
    staging = _beside(folder, INCOMPLETE)
    shutil.rmtree(staging, ignore_errors=True)
    if (left := next(staging.rglob("*_states.pt"), None)) is not None:
        raise CheckpointError(f"{left} is of a save that did not end, and cannot be removed")
    replaced = _beside(folder, REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(folder)


def discard(save_dir: Path, tag: str) -> None:
    """The unfinished files of a save that failed are gone, as far as they can be removed."""
    shutil.rmtree(_beside(save_dir / tag, INCOMPLETE), ignore_errors=True)


def commit(save_dir: Path, tag: str, manifest: Manifest, *, is_latest: bool) -> None:
    """`TAG.incomplete` is the checkpoint `tag`, and if `is_latest`, `latest` points to it.

    Raises:
        CheckpointError: files of the manifest are not there: other ranks wrote them elsewhere.
        OSError: of the file system; `latest` and what it points to are as before.
    """
    folder = save_dir / tag
    staging, replaced = _beside(folder, INCOMPLETE), _beside(folder, REPLACED)
    elsewhere = [name for name, entry in manifest.files.items() if not _has_size(staging / name, entry.num_bytes)]
    if elsewhere:
        raise CheckpointError(
            f"{staging / elsewhere[0]} is not here as rank {manifest.files[elsewhere[0]].rank} wrote it. Hosts with "
            'disks of their own need "checkpoint": {"use_node_local_storage": true}'
        )
    if folder.exists():
        _keep_foreign_files(folder, staging)
    write_manifest(staging, manifest)
    if folder.exists():
        folder.rename(replaced)
    try:
        staging.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    _sync_folder(folder.parent)
    if is_latest:
        _write(save_dir / LATEST, tag)
    shutil.rmtree(replaced, ignore_errors=True)


def find(load_dir: Path, tag: str) -> str:
    """The tag under which checkpoint `tag` lies: a kill between two renames leaves the old one as `TAG.replaced`."""
    folder = load_dir / tag
    if not folder.exists() and _beside(folder, REPLACED).exists():
        return tag + REPLACED
    return tag


def complete_tags(load_dir: Path) -> list[str]:
    """Tags of the checkpoints in `load_dir` that have a manifest, newest first."""
    found = [path for path in load_dir.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(INCOMPLETE)]
    return [path.parent.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _keep_foreign_files(old: Path, new: Path) -> None:
    """What the user has put beside our files in `old` is in `new` too, as if it had been overwritten in place.

    By hard links, which take no time: other ranks wait. File systems without them get copies.
    """
    try:
        manifest = read_manifest(old)
    except CheckpointError:
        manifest = None
    ours = {MANIFEST, *({Path(name).parts[0] for name in manifest.files} if manifest else ())}
    for entry in old.iterdir():
        if entry.name in ours or entry.name.endswith("_states.pt") or (new / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)


def _link(source: str | Path, target: str | Path) -> None:
    """`target` is the same file as `source`, or where that cannot be, a copy of it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before: on the disk, and by a rename."""
    temporary = _beside(path, ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
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
