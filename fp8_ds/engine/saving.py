"""Saves that are whole or not there: DeepSpeed writes the files, this says when they count.

Stock code writes into `TAG.incomplete` and every rank checksums its own files; all ranks tell each other; one of each
host writes the manifest, then renames, then clears up (fp8_ds/checkpoint/folders.py). A failure on any rank is an error
on all, and the checkpoint before is as it was. Ranks wait for each other as in waiting.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.contents import deepspeed_classes, unknown_names
from fp8_ds.checkpoint.manifest import Manifest
from fp8_ds.engine.fit import layout
from fp8_ds.engine.waiting import Say, all_do
from fp8_ds.errors import CheckpointError

_NUM_SHOWN = 3


class Recorder:
    """DeepSpeed's checkpoint engine, which remembers what it wrote. A failure waits until all ranks can hear of it.

    Args:
        stock: that engine.
        tag: the name that the checkpoint will have, which the stock engine logs; stock code is given another.
    """

    def __init__(self, stock: Any, tag: str) -> None:
        self.stock = stock
        self.tag = tag
        self.paths: list[Path] = []
        self.error = ""
        self._commit_info: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def create(self, info: Any) -> None:
        self.stock.create(replace(info, tag=self.tag))

    def commit(self, info: Any) -> bool:
        """Nothing yet: the checkpoint is not complete when stock code says so."""
        self._commit_info = replace(info, tag=self.tag)
        return True

    def commit_now(self) -> None:
        """The stock engine has been told that the checkpoint is complete."""
        if self._commit_info is not None:
            self.stock.commit(self._commit_info)

    def save(self, state_dict: Any, path: Any) -> None:
        self.paths.append(Path(path))
        self.attempt(self._save, state_dict, path)

    def _save(self, state_dict: Any, path: Any) -> None:
        with folders.as_file_errors(Path(path)):
            self.stock.save(state_dict, path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.attempt(self.stock.makedirs, path, exist_ok=exist_ok)

    def attempt(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `action` returns; None where it or an earlier one failed."""
        if self.error:
            return None
        try:
            return action(*args, **kwargs)
        except Exception as error:  # raised on all ranks once all know
            self.error = f"{type(error).__name__}: {str(error)[:300]}"
            return None


def save_whole(engine: Any, save_dir: Any, tag: str, is_latest: bool, write: Callable[[str], Any], say: Say) -> Any:
    """The checkpoint `tag` is in `save_dir`, complete and checksummed, on all ranks alike. Collective over all ranks.

    Args:
        engine: whose `checkpoint_engine` writes.
        save_dir: one folder for all ranks; with `use_node_local_storage` one on each host.
        tag: name of the checkpoint.
        is_latest: the file `latest` points to it afterwards.
        write: stock save, given the tag to write under.
        say: called with a line for rank 0.

    Raises:
        CheckpointError: a rank could not write, on all ranks; what was there before is as it was.
    """
    folder = Path(save_dir)
    recorder = Recorder(engine.checkpoint_engine, tag)
    leads = is_first_of_host(engine)
    _prepare(recorder, folder, tag, leads, say)
    engine.checkpoint_engine = recorder
    try:
        result = write(tag + folders.INCOMPLETE)
    finally:
        engine.checkpoint_engine = recorder.stock
    staging, save_id = folder / (tag + folders.INCOMPLETE), uuid4().hex
    told: list[_Part] = all_do("save_checkpoint", lambda: _part(engine, recorder, staging, save_id), say)
    failed = _unfit(told)
    if not failed and engine.use_node_local_storage():
        found = all_do("save_checkpoint", lambda: _of_other_hosts(told, host_of(engine), staging), say)
        failed = [text for text in found if text]
    if not failed:
        written = {name: entry for part in told if part.host == host_of(engine) for name, entry in part.files.items()}
        manifest = Manifest({**_header(engine, tag), "save": told[0].save_id}, written)
        commit = folders.Commit(folder, tag, manifest, is_latest=is_latest) if leads else None
        failed = _take(commit, recorder, say)
    if failed:
        if leads:
            folders.discard(folder, tag)
        raise CheckpointError(
            f"save_checkpoint: expected every rank to write its part of {str(folder / tag)!r}, got "
            f"{'; '.join(failed[:_NUM_SHOWN])}. Make room or choose another folder; older checkpoints are kept."
        )
    recorder.commit_now()
    say(f"fp8: checkpoint {folder / tag} is complete{', and latest names it' if is_latest else ''}")
    if names := sorted({name for part in told for name in part.unknown}):
        say(
            f"fp8: the checkpoint holds objects of {', '.join(names)} (of client_state, a scheduler or the optimizer). "
            "Its load will need torch.serialization.add_safe_globals([...]) with these"
        )
    return result


def _prepare(recorder: Recorder, folder: Path, tag: str, leads: bool, say: Say) -> None:
    """Nothing is left of a save of `tag` that was killed, and a save that all hosts have is still there. Collective."""

    def saves() -> dict[str, int] | None:
        found = recorder.attempt(folders.complete_saves, folder, [tag]) if leads else None
        return None if found is None else {name: save.written for name, save in found.items()}

    keep = folders.common_save([found for found in all_do("save_checkpoint", saves, say) if found is not None])
    all_do("save_checkpoint", lambda: leads and recorder.attempt(folders.prepare, folder, tag, keep), say)


def _take(commit: folders.Commit | None, recorder: Recorder, say: Say) -> list[str]:
    """The steps of all hosts, none before all have ended the one before. Collective.

    Args:
        commit: of the first rank of a host; None on its others.
        recorder: of this rank.
        say: called with a line for rank 0.

    Returns:
        What failed, by rank; then what was there before is there again.
    """

    def on_all(step: Callable[[folders.Commit], None]) -> list[str]:
        def work() -> str:
            if commit is not None:
                recorder.attempt(step, commit)
            return recorder.error

        errors = all_do("save_checkpoint", work, say)
        return [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]

    failed = on_all(folders.Commit.stage) or on_all(folders.Commit.publish)
    if not failed:
        on_all(folders.Commit.finish)
        return []
    return failed + _undo(commit, say)


def _undo(commit: folders.Commit | None, say: Say) -> list[str]:
    """What failed of it, by rank. Collective."""

    def work() -> str:
        try:
            if commit is not None:
                commit.undo()
        except OSError as error:
            return str(error)
        return ""

    errors = all_do("save_checkpoint", work, say)
    return [f"rank {rank} could not undo its renames: {error}" for rank, error in enumerate(errors) if error]


# --- parts ---


@dataclass(frozen=True)
class _Part:
    """What one rank wrote of a checkpoint.

    Attributes:
        tag, save_id: of its call; the first rank's `save_id` names the save.
        host: ranks of the same number see the same folder.
        files: by name within the folder.
        unknown: classes in them that a load has to be told of.
        error: what failed; empty if nothing did.
    """

    tag: str
    save_id: str
    host: int
    files: dict[str, manifests.FileRecord]
    unknown: list[str]
    error: str


def _part(engine: Any, recorder: Recorder, staging: Path, save_id: str) -> _Part:
    """Of this rank: its files are on the disk, read back and checksummed."""
    rank = dist.get_rank()
    files = recorder.attempt(
        lambda: {path.relative_to(staging).as_posix(): manifests.record(path, rank) for path in recorder.paths}
    )
    paths = [] if recorder.error else recorder.paths
    unknown = [name for path in paths for name in unknown_names(path, deepspeed_classes())]
    return _Part(recorder.tag, save_id, host_of(engine), files or {}, unknown, recorder.error)


def _unfit(parts: list[_Part]) -> list[str]:
    """Why the parts of all ranks are no checkpoint; empty if they are one."""
    failed = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]
    if len(tags := sorted({part.tag for part in parts})) > 1:
        failed.append(f"tags {tags[:_NUM_SHOWN]}")
    writers = defaultdict(list)
    for rank, part in enumerate(parts):
        for name in part.files:
            writers[part.host, name].append(rank)
    failed += [
        f"{name} written by ranks {ranks} at once: one rank of a host must write it (engine.save_non_zero_checkpoint)"
        for (_, name), ranks in writers.items()
        if len(ranks) > 1
    ]
    return failed


def _of_other_hosts(parts: list[_Part], host: int, staging: Path) -> str:
    """How files of another host's ranks came into `staging`, this host's own; empty if there are none."""
    own = {name for part in parts if part.host == host for name in part.files}
    for rank, part in enumerate(parts):
        for name in part.files:
            if part.host != host and name not in own and (staging / name).exists():
                return (
                    f"{staging / name} of rank {rank} on the disk of rank {host}'s host (remove "
                    '"use_node_local_storage", which is for hosts with disks of their own)'
                )
    return ""


def _header(engine: Any, tag: str) -> dict[str, Any]:
    return {"tag": tag, "global_steps": engine.global_steps, **layout(engine), **manifests.versions()}


def host_of(engine: Any) -> int:
    """Ranks of the same number see the same folder."""
    return dist.get_rank() - engine.local_rank if engine.use_node_local_storage() else 0


def is_first_of_host(engine: Any) -> bool:
    return dist.get_rank() == host_of(engine)
