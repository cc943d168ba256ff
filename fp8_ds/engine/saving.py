"""Saves that are either complete or absent: DeepSpeed writes the files, and this module publishes them.

DeepSpeed writes into a folder beside, and every rank checksums its own files; the first rank of each host then takes
the steps of fp8_ds/checkpoint/folders.py. A failure on any rank is an error on all, and earlier checkpoints are kept.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch.distributed as dist

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.contents import unknown_names
from fp8_ds.engine.ranks import all_do, say_problem, tell_all
from fp8_ds.errors import CheckpointError

_NUM_SHOWN = 3


def host_of(engine: Any) -> int:
    """Return the first rank of this host; ranks of the same number see the same folder."""
    return dist.get_rank() - engine.local_rank if engine.use_node_local_storage() else 0


def layout(engine: Any) -> dict[str, int]:
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "dp_world_size": engine.seq_dp_world_size,
        "mp_world_size": engine.mp_world_size,
    }


class Recorder:
    """Wrapper of DeepSpeed's checkpoint engine that records its files, and keeps an error until all ranks can hear."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.paths: list[Path] = []
        self.error = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def save(self, state_dict: Any, path: Any) -> None:
        self.paths.append(Path(path))
        self.attempt(folders.as_file_errors(Path(path))(self.original.save), state_dict, path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.attempt(self.original.makedirs, path, exist_ok=exist_ok)

    def attempt(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `action`, unless an earlier one has failed. Keep only the text of an error, and thus no open file."""
        if not self.error:
            try:
                action(*args, **kwargs)
            except Exception as error:
                self.error = f"{type(error).__name__}: {str(error)[:300]}"


class _Part(NamedTuple):
    """Files that one rank of `host` wrote, by name, and classes in them that a load has to be told of."""

    host: int
    files: dict[str, folders.FileRecord]
    unknown: list[str]


def save_whole(engine: Any, save_dir: Any, tag: str, is_latest: bool, write: Callable[[str], Any]) -> Any:
    """Save the checkpoint `tag` into `save_dir`, complete and checksummed. Collective.

    Args:
        engine: the engine, whose `checkpoint_engine` writes.
        save_dir: one folder for all ranks; with `use_node_local_storage` one on each host.
        tag: the same on all ranks.
        is_latest: whether the file `latest` names it afterwards.
        write: DeepSpeed's own save, called with the tag to write under.
    """
    folder, host, rank = Path(save_dir), host_of(engine), dist.get_rank()
    recorder, save_id = Recorder(engine.checkpoint_engine), str(tell_all(uuid4().hex[:8])[0])
    save = folders.Save(folder, tag, save_id, is_latest=is_latest)

    def on_all(work: Callable[[], Any]) -> list[Any]:
        """Do `work` on all ranks. If one fails, remove the save and raise on all."""
        found, failed = all_do("save_checkpoint", work)
        if failed:
            undone = all_do("save_checkpoint", lambda: save.undo() if rank == host else None)[1]
            failed = failed[:_NUM_SHOWN] + [f"{text} (renames not undone)" for text in undone]
            raise CheckpointError(
                f"save_checkpoint: expected every rank to write its part of {str(folder / tag)!r}, got "
                f"{'; '.join(failed)}. Make room or choose another folder; older checkpoints are kept."
            )
        return found

    def on_hosts(work: Callable[[], Any]) -> None:
        """Do `work` on the first rank of each host; no host begins a step before all have ended the one before."""
        on_all(lambda: work() if rank == host else None)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lock.enter_context(folders.take_lock(folder, f"{host or ''}", say_problem))
        save.prepare()

    def read_back() -> _Part:
        if recorder.error:
            raise CheckpointError(f"rank {rank}: {recorder.error}")
        files = {path.relative_to(save.staging).as_posix(): folders.record(path, rank) for path in recorder.paths}
        unknown = [name for path in recorder.paths for name in unknown_names(path)]
        return _Part(host, files, unknown)

    def stage() -> None:
        _check_writers(parts, host, save.staging)
        header = {"tag": tag, "global_steps": engine.global_steps, "save": save_id}
        files = {name: entry for part in parts if part.host == host for name, entry in part.files.items()}
        save.stage(folders.Manifest({**header, **layout(engine), **folders.versions()}, files))

    with contextlib.ExitStack() as lock:
        on_hosts(begin)
        engine.checkpoint_engine = recorder
        try:
            result = write(save.staging_tag)
        finally:
            engine.checkpoint_engine = recorder.original
        parts: list[_Part] = on_all(read_back)
        on_hosts(stage)
        on_hosts(save.publish)
        all_do("save_checkpoint", lambda: save.finish() if rank == host else None)  # it is complete in any case
    if names := sorted({name for part in parts for name in part.unknown}):
        say_problem(
            f"fp8: the checkpoint holds objects of {', '.join(names)} (of client_state, a scheduler or the optimizer). "
            "Its load will need torch.serialization.add_safe_globals([...]) with these"
        )
    return result


def _check_writers(parts: list[_Part], host: int, staging: Path) -> None:
    """Check that one rank of a host has written each file, and that this host's disk has no files but its own."""
    writers = defaultdict(list)
    for rank, part in enumerate(parts):
        for name in part.files:
            writers[part.host, name].append(rank)
    for (of_host, name), ranks in writers.items():
        path = staging / name
        if len(ranks) > 1:
            raise CheckpointError(
                f"{name} written by ranks {ranks} at once: one rank of a host must write it "
                "(engine.save_non_zero_checkpoint)"
            )
        if of_host == host and not path.is_file():
            raise CheckpointError(
                f"{path} is not here as rank {ranks[0]} wrote it. Hosts with disks of their own need "
                '"checkpoint": {"use_node_local_storage": true}'
            )
        if of_host != host and (host, name) not in writers and path.exists():
            raise CheckpointError(
                f"{path} of rank {ranks[0]} on the disk of rank {host}'s host (remove "
                '"use_node_local_storage", which is for hosts with disks of their own)'
            )
