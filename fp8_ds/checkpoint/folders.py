"""The folders of a checkpoint: complete under its name, or there under a name that says that it is not.

Files are written into `TAG.incomplete`, the manifest last. Then the folder takes its name by a rename, and the file
`latest` follows by another; the old checkpoint of a tag that is saved again is `TAG.replaced` until then. So a kill at
any moment leaves the checkpoint before or the new one.

Hosts with disks of their own do the same, one step at a time: none begins a step before all have ended the one before.
What a kill leaves may differ from host to host, but there is always a save that all of them have: `common_save`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8_ds.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    beside,
    read_manifest,
    sync_folder,
    write_manifest,
    write_text,
)
from fp8_ds.errors import CheckpointError, Fp8DsError

INCOMPLETE, REPLACED = ".incomplete", ".replaced"
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_NEXT = ".next"
_PROBE_BYTES = 1 << 20


def prepare(save_dir: Path, tag: str, keep: str | None = None) -> None:
    """What an earlier save of `tag` left behind, killed half-way, is gone; a complete one has its name.

    Args:
        save_dir: that holds the checkpoints.
        tag: that is to be saved.
        keep: the save of `tag` that all hosts have, if they have one; this host may have a newer one besides.

    Raises:
        CheckpointError: such files cannot be removed, and would be taken for the new checkpoint's.
    """
    folder = save_dir / tag
    staging, replaced = beside(folder, INCOMPLETE), beside(folder, REPLACED)
    _clear(staging)
    if not folder.exists():
        if replaced.exists():
            replaced.rename(folder)
    elif keep is not None and keep != _save_in(folder) and keep == _save_in(replaced):
        folder.rename(staging)
        replaced.rename(folder)
        _clear(staging)
    else:
        _remove(replaced)


def discard(save_dir: Path, tag: str) -> None:
    """The unfinished files of a save that failed are gone, as far as they can be removed."""
    _remove(beside(save_dir / tag, INCOMPLETE))


class Commit:
    """The steps that make `TAG.incomplete` the checkpoint `tag` on one host: `stage`, `publish`, `finish`.

    Args:
        save_dir: that holds the checkpoints.
        tag: name of the new one.
        manifest: of the files on this host.
        is_latest: `latest` points to it afterwards.
    """

    def __init__(self, save_dir: Path, tag: str, manifest: Manifest, *, is_latest: bool) -> None:
        self._tag = tag
        self._folder = save_dir / tag
        self._staging, self._replaced = beside(self._folder, INCOMPLETE), beside(self._folder, REPLACED)
        self._latest = save_dir / LATEST
        self._next_latest, self._old_latest = beside(self._latest, _NEXT), beside(self._latest, REPLACED)
        self._manifest = manifest
        self._is_latest = is_latest
        self._undos: list[Callable[[], object]] = []

    def stage(self) -> None:
        """Everything that needs room on the disk is written; nothing has been renamed.

        Raises:
            CheckpointError: files of the manifest are not there: other ranks wrote them elsewhere.
            OSError: of the file system.
        """
        files = self._manifest.files
        elsewhere = [name for name, entry in files.items() if not _has_size(self._staging / name, entry.num_bytes)]
        if elsewhere:
            raise CheckpointError(
                f"{self._staging / elsewhere[0]} is not here as rank {files[elsewhere[0]].rank} wrote it. Hosts with "
                'disks of their own need "checkpoint": {"use_node_local_storage": true}'
            )
        if self._folder.exists():
            _keep_foreign_files(self._folder, self._staging)
        write_manifest(self._staging, self._manifest)
        if self._is_latest:
            write_text(self._next_latest, self._tag)
            self._old_latest.unlink(missing_ok=True)  # of a save that was killed
            if self._latest.exists():
                link(self._latest, self._old_latest)

    def publish(self) -> None:
        """The checkpoint has its name, and `latest` names it.

        Raises:
            OSError: of the file system; what was there before is as it was.
        """
        try:
            if self._folder.exists():
                self._rename(self._folder, self._replaced)
            self._rename(self._staging, self._folder)
            sync_folder(self._folder.parent)
            if self._is_latest:
                self._next_latest.replace(self._latest)
                self._undos.append(self._restore_latest)
                sync_folder(self._latest.parent)
        except OSError:
            self.undo()
            raise

    def undo(self) -> None:
        """What was there before `publish` is there again, and nothing of `stage` beside it."""
        while self._undos:
            self._undos[-1]()
            self._undos.pop()
        _unlink(self._next_latest)
        _unlink(self._old_latest)

    def finish(self) -> None:
        """What the checkpoint replaces is gone, as far as it can be removed."""
        _remove(self._replaced)
        _unlink(self._old_latest)

    def _rename(self, old: Path, new: Path) -> None:
        old.rename(new)
        self._undos.append(lambda: new.rename(old))

    def _restore_latest(self) -> None:
        if self._old_latest.exists():
            self._old_latest.replace(self._latest)
        else:
            self._latest.unlink()


# --- finding ---


@dataclass(frozen=True)
class Save:
    """One complete save on this host's disk. `tag`: its folder's name. `written`: when, ns, by this host's clock."""

    tag: str
    manifest: Manifest
    written: int


def find(load_dir: Path, tag: str) -> str:
    """The tag under which checkpoint `tag` lies: a kill between two renames leaves the old one as `TAG.replaced`."""
    folder = load_dir / tag
    if not folder.exists() and beside(folder, REPLACED).exists():
        return tag + REPLACED
    return tag


def complete_saves(load_dir: Path, tags: Iterable[str]) -> dict[str, Save]:
    """Saves of `tags` that have a manifest, those being replaced among them, by what names a save on all hosts."""
    found: dict[str, Save] = {}
    for name in (tag + suffix for tag in tags for suffix in ("", REPLACED)):
        manifest = _intact_manifest(load_dir / name)
        if manifest is not None and (save := manifest.header.get("save")) is not None:
            found.setdefault(save, Save(name, manifest, (load_dir / name / MANIFEST).stat().st_mtime_ns))
    return found


def common_save(told: Sequence[Mapping[str, int]]) -> str | None:
    """The newest save that every host has complete; None if there is none.

    Args:
        told: by host, the same on all: when each of its saves was written there. The first host's clock counts.
    """
    common = [save for save in told[0] if all(save in other for other in told)] if told else []
    return max(common, key=lambda save: told[0][save], default=None)


def complete_tags(load_dir: Path) -> list[str]:
    """Tags of the checkpoints in `load_dir` that have a manifest, newest first."""
    found = [path for path in load_dir.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(INCOMPLETE)]
    return [path.parent.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def describe_complete(load_dir: Path, besides: str | None = None) -> str:
    """A sentence for an error about the checkpoint `besides`: which others `load_dir` has."""
    others = [tag for tag in complete_tags(load_dir) if tag != besides]
    return f"Complete in {str(load_dir)!r}: {others or 'none else'}."


def _save_in(folder: Path) -> str | None:
    manifest = _intact_manifest(folder)
    return None if manifest is None else manifest.header.get("save")


def _intact_manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


# --- files ---


@contextlib.contextmanager
def as_file_errors(path: Path, place: Path | None = None) -> Iterator[None]:
    """Make an OSError of what torch and safetensors raise where a file cannot be written, as on a full disk.

    Neither has the system's number as an OSError has it (torch: "unexpected pos 768 vs 696"). So what is written here
    then asks for it: a MiB behind the file, which is discarded.
    Source: caffe2/serialize/inline_container.cc, whose errors have its name; safetensors' one class for all.

    Args:
        path: that is written: a file, or a folder of files.
        place: where such a folder's files are until they are complete.
    """
    try:
        yield
    except Exception as error:
        of_a_file = "inline_container" in str(error) or type(error).__name__ == "SafetensorError"
        if isinstance(error, Fp8DsError) or not of_a_file:
            raise
        try:
            _append(path if place is None else place / "probe")
        except OSError as found:
            raise OSError(found.errno, found.strerror, str(path)) from error
        raise OSError(f"{path}: not written ({error})") from error


def _append(path: Path) -> None:
    """A file is longer, on the disk; one that was not there is gone again."""
    was_there = path.exists()
    try:
        with path.open("ab", buffering=0) as file:
            left = _PROBE_BYTES
            while left:
                left -= file.write(bytes(left))
            os.fsync(file.fileno())
    finally:
        if not was_there:
            path.unlink(missing_ok=True)


def link(source: str | Path, target: str | Path) -> None:
    """`target` is the same file as `source`, or where that cannot be, a copy of it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _clear(staging: Path) -> None:
    _remove(staging)
    if (left := next(staging.rglob("*_states.pt"), None)) is not None:
        raise CheckpointError(f"{left} is of a save that did not end, and cannot be removed")


def _remove(folder: Path) -> None:
    """`folder` is gone, as far as it can be; its manifest first, so that what is left is not taken for complete."""
    _unlink(folder / MANIFEST)
    shutil.rmtree(folder, ignore_errors=True)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _keep_foreign_files(old: Path, new: Path) -> None:
    """What the user has put beside our files in `old` is in `new` too, as if it had been overwritten in place.

    By hard links, which take no time: other ranks wait. File systems without them get copies.
    """
    manifest = _intact_manifest(old)
    ours = {MANIFEST, *({Path(name).parts[0] for name in manifest.files} if manifest else ())}
    for entry in old.iterdir():
        if entry.name in ours or entry.name.endswith("_states.pt") or (new / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=link)
        else:
            link(entry, new / entry.name)
