"""Checkpoints on the disk: complete ones under their names, others under names that say that they are not.

A save writes into `TAG.ID.incomplete`, the manifest (sizes, CRC-32) last. A rename gives the folder its name, and
another one lets `latest` name it; the old checkpoint is `TAG.ID.replaced` until then. So a kill at any moment leaves
the old checkpoint or the new one. Hosts with their own disks take each step together, so one save is on all.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import deepspeed
import torch

from fp8_ds import __version__
from fp8_ds.checkpoint.contents import read_structure
from fp8_ds.config.explain import parse_json
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError

MANIFEST = "fp8_ds_manifest.json"
INCOMPLETE, REPLACED = ".incomplete", ".replaced"
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
GLOBAL_STATE = "zero/optimizer_state.pt"
"""File that universal checkpoints have, and others do not."""
TENSORS = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
"""Files of a parameter in a universal checkpoint, within zero/NAME."""
_NEXT, _LOCK = "latest.next", ".fp8_ds_lock"
_FORMAT = 1
_CHUNK_BYTES = 1 << 22
_OPENED = re.compile(r"layer_\d+-.*model_states\.pt|.*[-_](model|optim)_states\.pt")
"""Names of files that DeepSpeed opens by a pattern; no other is a checkpoint's."""


class FileRecord(NamedTuple):
    """One file as it was written, and by which rank."""

    num_bytes: int
    crc32: str
    rank: int


class Manifest(NamedTuple):
    """Description of a checkpoint's writer (`header`, JSON values by name), and its `files` by relative path."""

    header: dict[str, Any]
    files: dict[str, FileRecord]

    def __str__(self) -> str:
        """Name the save, alike on all hosts that have a part of it, whatever its folder is called there."""
        return f"{self.header.get('tag')} of step {self.header.get('global_steps')} (save {self.header.get('save')})"


def record(path: Path, rank: int, *, is_new: bool = True) -> FileRecord:
    """Read a file that `rank` has written, and sync one that `is_new` to the disk."""
    num_bytes, crc = 0, 0
    with as_file_errors(path), path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes, crc = num_bytes + len(chunk), zlib.crc32(chunk, crc)
        if is_new:  # read-only file systems may refuse it
            os.fsync(file.fileno())
    return FileRecord(num_bytes, f"{crc:08x}", rank)


def damage(folder: Path, name: str, expected: FileRecord | None) -> str:
    """Describe what is wrong with a file; empty if nothing is."""
    if not (path := folder / name).is_file():
        return f"{path} is missing"
    if expected is None:
        return ""
    try:
        found = record(path, expected.rank, is_new=False)
    except OSError as error:
        return f"{path} cannot be read ([Errno {error.errno}] {error.strerror})"
    if found == expected:
        return ""
    there, written = (f"{entry.num_bytes} bytes of CRC-32 {entry.crc32}" for entry in (found, expected))
    return f"{path} has {there} where {written} were written"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`, which makes it complete."""
    write_text(folder / MANIFEST, _text(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in `folder`, None if there is none. Raise a CheckpointError if it is not whole or not ours."""
    path = folder / MANIFEST
    try:
        refuse_special([path])
        content = parse_json(text := path.read_text(encoding="utf-8"))["content"]
        form, header = content["format"], dict(content["header"])
        if form != _FORMAT:
            by = header.get("fp8_ds")
            raise CheckpointError(f"{path}: expected format {_FORMAT}, got {form!r} of fp8_ds {by}. Load it with that.")
        manifest = Manifest(header, {name: FileRecord(**entry) for name, entry in content["files"].items()})
        if text == _text(manifest) and not any(map(leads_elsewhere, manifest.files)):
            return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path}: expected a manifest as it was written, got a damaged one. Load another checkpoint.")


def _text(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a checksum by which any changed byte is found."""
    files = {name: entry._asdict() for name, entry in manifest.files.items()}
    content = {"format": _FORMAT, "header": manifest.header, "files": files}
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return json.dumps({"crc32": f"{crc:08x}", "content": content}, indent=1, sort_keys=True) + "\n"


def seal_universal(folder: Path, tag: str) -> Manifest:
    """Write and return a manifest of the files in the universal checkpoint `folder`, to be called `tag`."""
    files = {name: record(folder / name, 0) for name in sorted(own_files(folder))}
    content = f"{zlib.crc32(repr(files).encode()):08x}"
    write_manifest(folder, manifest := Manifest({"tag": tag, "save": content, **versions()}, files))
    return manifest


def versions() -> dict[str, str]:
    return {"fp8_ds": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}


class Save:
    """The steps of one save on one host: `prepare`, a write into `staging`, `stage`, `publish`, and `finish` or `undo`.

    `save_id` is eight hexadecimal digits, and differs for each save.
    """

    def __init__(self, save_dir: Path, tag: str, save_id: str, *, is_latest: bool) -> None:
        self._tag, self._is_latest = tag, is_latest
        self.staging_tag = f"{tag}.{save_id}{INCOMPLETE}"
        self.folder, self.staging = save_dir / tag, save_dir / self.staging_tag
        self._replaced, self._latest = save_dir / f"{tag}.{save_id}{REPLACED}", save_dir / LATEST
        self._undos: list[Callable[[], object]] = []

    def prepare(self) -> None:
        """Remove what a killed save of the tag has left; the checkpoint that it was to replace stays."""
        for path in _beside(self.folder, INCOMPLETE):
            _remove(path)
        restore_replaced(self.folder)

    def stage(self, manifest: Manifest) -> None:
        """Write everything that needs room on the disk, before anything is renamed."""
        if self.folder.is_dir():
            _keep_foreign_files(self.folder, self.staging)
        if self._is_latest:
            write_text(self.staging / _NEXT, self._tag)
        write_manifest(self.staging, manifest)

    def publish(self) -> None:
        """Give the checkpoint its name, then let `latest` name it."""
        for old, new in ((self.folder, self._replaced), (self.staging, self.folder)):
            if os.path.lexists(old):
                old.rename(new)
                self._undos.append(partial(new.rename, old))
        sync_folder(self.folder.parent)
        if self._is_latest:
            before = self._latest.read_text() if self._latest.is_file() else None
            (self.folder / _NEXT).replace(self._latest)
            self._undos.append(self._latest.unlink if before is None else partial(write_text, self._latest, before))
            sync_folder(self._latest.parent)

    def undo(self) -> None:
        """Bring back what was there before `publish`, and remove the save."""
        for undo in reversed(self._undos):
            undo()
        _remove(self.staging)

    def finish(self) -> None:
        """Remove what the checkpoint replaces, as far as it can be removed."""
        for path in _beside(self.folder, REPLACED):
            _remove(path)


def restore_replaced(folder: Path) -> None:
    """Give the checkpoint its name back that a killed save was to replace, where it had renamed that one only."""
    if not os.path.lexists(folder) and (replaced := _beside(folder, REPLACED)):
        replaced[0].rename(folder)


def refuse_tag(tag: str) -> None:
    """Check that a checkpoint can be saved under `tag`: that `latest` can hold it, and no save uses it for itself."""
    is_name = not leads_elsewhere(tag) and str(PurePath(tag)) == tag == tag.strip() and tag.isprintable()
    if not is_name or tag.endswith((INCOMPLETE, REPLACED)) or tag in (LATEST, LATEST_UNIVERSAL):
        raise ConfigError(
            f"tag: expected the name of a folder in save_dir, in one line, none of {LATEST} and {LATEST_UNIVERSAL}, "
            f"without the endings {INCOMPLETE} and {REPLACED}, got {tag!r}. Choose another."
        )


def take_lock(
    save_dir: Path, name: str, say: Callable[[str], None], *, is_shared: bool = False
) -> contextlib.ExitStack:
    """Lock `save_dir` against saves of other jobs, once none is running. The end of this process unlocks it, too.

    Args:
        name: name of the lock.
        say: called with a line that names the job that is waited for, or says that there are no locks.
        is_shared: whether this job loads, which others may do at the same time.

    Returns:
        Stack that ends the lock when it is closed.
    """
    path, kind = save_dir / (_LOCK + name), fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    with contextlib.ExitStack() as lock:
        try:
            file = lock.enter_context(path.open("rb" if is_shared else "ab", buffering=0))
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"fp8: {save_dir}: waiting for {path.read_text(errors='replace')}, which saves into it")
                fcntl.flock(file, kind)
            if not is_shared:
                with contextlib.suppress(OSError):  # a full disk
                    file.truncate(0)
                    file.write(f"process {os.getpid()} of {socket.gethostname()}".encode())
        except FileNotFoundError:  # nobody has saved
            pass
        except OSError as error:
            say(f"fp8: {save_dir} cannot be locked ({error.strerror}): let no other job save into it at the same time")
        return lock.pop_all()


def _keep_foreign_files(old: Path, new: Path) -> None:
    """Link, or copy, into `new` what the user has put beside our files in `old`."""
    for entry in old.iterdir():
        is_ours = entry.name in (MANIFEST, _NEXT) or _OPENED.fullmatch(entry.name)
        if is_ours or os.path.lexists(new / entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=link)
        else:
            link(entry, new / entry.name)


def _remove(path: Path) -> None:
    """Remove a folder as far as it can be, its manifest first, or the link to one."""
    with contextlib.suppress(OSError):
        (path if path.is_symlink() else path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, suffix: str) -> list[Path]:
    """List what saves of `folder` have left beside it under names that end with `suffix`, the newest first."""
    found = [*folder.parent.glob(f"{glob.escape(folder.name)}.{'[0-9a-f]' * 8}{suffix}"), beside(folder, suffix)]
    return sorted(filter(os.path.lexists, found), key=lambda path: -path.lstat().st_mtime_ns)


def folders_of(load_dir: Path, tag: str) -> list[str]:
    """List the folders of `tag`: its own first, then those that killed saves were to replace."""
    folder = load_dir / tag
    found = [*([folder] if folder.exists() else []), *_beside(folder, REPLACED)]
    return [path.relative_to(load_dir).as_posix() for path in found] or [tag]


def describe_complete(load_dir: Path, besides: str | None = None) -> str:
    """Return a sentence for an error about the checkpoint `besides`: which others of `load_dir` have a manifest."""
    found = sorted(load_dir.glob(f"*/{MANIFEST}"), key=lambda path: -path.stat().st_mtime)
    others = [name for path in found if not (name := path.parent.name).endswith(INCOMPLETE) and name != besides]
    return f"Complete in {str(load_dir)!r}: {others or 'none else'}."


def own_files(folder: Path) -> dict[str, int]:
    """Return the size of every file that DeepSpeed may open in `folder`, of one save or universal, by relative path.

    Raises:
        CheckpointError: one is a pipe, a device, a folder or the like.
    """
    paths = [path for path in folder.iterdir() if _OPENED.fullmatch(path.name)]
    places = [folder / "zero"] if (folder / GLOBAL_STATE).exists() else []
    seen: set[Path] = set()
    for place in places:  # which grow; links may lead in circles
        if (real := place.resolve()) not in seen:
            seen.add(real)
            for entry in os.scandir(place):
                if entry.is_dir():
                    places.append(Path(entry.path))
                elif entry.name.endswith(".pt"):
                    paths.append(Path(entry.path))
    refuse_special(paths)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def read_layout(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read from a model file the layout of the run that wrote a save without a manifest.

    Returns:
        (layout, by names as in a manifest; names of the files of its ranks, without those of pipeline layers).
    """
    if (path := min(folder.glob("*mp_rank_*_model_states.pt"), default=None)) is None:
        raise CheckpointError(f"{folder} has neither a model file nor a {MANIFEST}")
    model, counts = read_structure(path), ("dp_world_size", "mp_world_size")
    if not isinstance(model, Mapping) or not all(isinstance(model.get(count), int) for count in counts):
        raise CheckpointError(f"{path}: expected {counts} as DeepSpeed writes them, got none. Load another checkpoint.")
    stage = 3 if path.name.startswith("zero_pp_rank_") else 2
    if stage != 3 and isinstance(config := model.get("ds_config"), Mapping):
        stage = config.get("zero_optimization", {}).get("stage", 0)
    most = len(os.listdir(folder)) + 1  # more than there can be: numbers in a file are whatever its sender has written
    dp_ranks, tp_ranks = (range(min(model[count], most)) for count in counts)
    parts = [f"mp_rank_{rank:02d}" for rank in tp_ranks]
    shards = [f"zero_pp_rank_{rank}_{part}" for rank in dp_ranks for part in parts]
    names = [f"{name}_model_states.pt" for name in (shards if stage == 3 else parts)]
    if model.get("param_shapes") is not None:
        prefix = "" if any(folder.glob("zero_*_optim_states.pt")) else "bf16_"
        names += [f"{prefix}{name}_optim_states.pt" for name in shards]
    return {"zero_stage": stage, **{count: model[count] for count in counts}}, names


_SPECIAL = {"p": "a named pipe", "s": "a socket", "d": "a folder"}


def refuse_special(paths: Iterable[Path]) -> None:
    """Check that all `paths` are files or links to files: a pipe would be waited for, and a device read without end."""
    for path in paths:
        if not stat.S_ISREG(mode := path.stat().st_mode):
            kind = _SPECIAL.get(stat.filemode(mode)[0], "a device")
            raise CheckpointError(f"{path}: expected a file, got {kind}. Remove it, or name a folder without it.")


def leads_elsewhere(name: Any) -> bool:
    """Whether `folder / name` is not in `folder`. Names in a checkpoint are whatever its sender has written."""
    path = PurePath(name) if isinstance(name, str) else None
    return path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(name)


def read_latest(path: Path) -> str | None:
    """Read the tag in a file `latest`, None if there is none; it must name something in its folder."""
    if not path.exists():
        return None
    refuse_special([path])
    refuse_paths([tag := path.read_text(errors="replace").strip()], path)
    return tag


def refuse_paths(names: Iterable[Any], file: Path) -> None:
    """Check that all `names`, which `file` has, are names within a folder, so that nothing elsewhere is opened."""
    for name in filter(leads_elsewhere, names):
        raise CheckpointError(f"{file}: expected names that stay in their folder, got {name!r}. Do not use it.")


def write_text(path: Path, text: str) -> None:
    """Write `text` into `path`, on the disk; after a kill on the way the file has its old text."""
    temporary = beside(path, ".tmp")
    with as_file_errors(path), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def sync_folder(folder: Path) -> None:
    """Bring renames in `folder` to the disk. Some network file systems cannot, and need not."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def link(source: str | Path, target: str | Path) -> None:
    """Make `target` a hard link to `source`, or a copy if that fails."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


@contextlib.contextmanager
def as_file_errors(path: Path) -> Iterator[None]:
    """Make errors of reading or writing `path`, a file or a folder of files, name it and say why, as on a full disk.

    Errors of torch (caffe2/serialize/inline_container.cc) and safetensors lack the system's number (torch: "unexpected
    pos 768 vs 696"). To get it, a MiB is written to the end of the file, which is discarded.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        of_a_file = "inline_container" in str(error) or type(error).__name__ == "SafetensorError"
        if isinstance(error, Fp8DsError) or not of_a_file:
            raise
        probe = path / "probe" if path.is_dir() else path
        was_there = probe.exists()
        try:
            with as_file_errors(path), probe.open("ab") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        finally:
            if not was_there:
                probe.unlink(missing_ok=True)
        raise OSError(f"{path}: not written ({error})") from error
