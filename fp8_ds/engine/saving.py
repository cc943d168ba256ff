"""Checkpoints that are whole or not there: DeepSpeed writes and reads the files, this says when they count.

A save: stock code writes into `TAG.incomplete` and every rank checksums its own files; all ranks tell each other; one
writes the manifest and renames (fp8_ds/checkpoint/manifest.py). A failure on any rank is an error on all, and the
checkpoint before is untouched. A load: files are shared out over the ranks by size, which compare checksums and read
each pickle without executing it; only then does stock code open one. Ranks wait for each other as in waiting.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.contents import deepspeed_classes, read_structure, unknown_names
from fp8_ds.checkpoint.manifest import Manifest
from fp8_ds.engine.fit import layout, other_parameters, other_run, versions
from fp8_ds.engine.waiting import Say, all_do, tell_all
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
        self.attempt(self.stock.save, state_dict, path)

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
    leads = _leads(engine)
    all_do("save_checkpoint", lambda: leads and recorder.attempt(manifests.prepare, folder, tag), say)
    engine.checkpoint_engine = recorder
    try:
        result = write(tag + manifests.INCOMPLETE)
    finally:
        engine.checkpoint_engine = recorder.stock
    staging, save_id = folder / (tag + manifests.INCOMPLETE), uuid4().hex
    told: list[_Part] = all_do("save_checkpoint", lambda: _part(engine, recorder, staging, save_id), say)
    failed = _unfit(told)
    if not failed and engine.use_node_local_storage():
        found = all_do("save_checkpoint", lambda: _of_other_hosts(told, _host(engine), staging), say)
        failed = [text for text in found if text]
    if not failed:
        written = {name: entry for part in told if part.host == _host(engine) for name, entry in part.files.items()}
        manifest = Manifest({**_header(engine, tag), "save": told[0].save_id}, written)

        def commit() -> str:
            if leads:
                recorder.attempt(manifests.commit, folder, tag, manifest, is_latest=is_latest)
            return recorder.error

        errors = all_do("save_checkpoint", commit, say)
        failed = [f"rank {i}: {error}" for i, error in enumerate(errors) if error]
    if failed:
        if leads:
            manifests.discard(folder, tag)
        raise CheckpointError(
            f"save_checkpoint: expected every rank to write its part of {str(folder / tag)!r}, got "
            f"{'; '.join(failed[:_NUM_SHOWN])}. Make room or choose another folder; older checkpoints are untouched."
        )
    recorder.commit_now()
    say(f"fp8: checkpoint {folder / tag} is complete{', and latest names it' if is_latest else ''}")
    if names := sorted({name for part in told for name in part.unknown}):
        say(
            f"fp8: the checkpoint holds objects of {', '.join(names)} (of client_state, a scheduler or the optimizer). "
            "Its load will need torch.serialization.add_safe_globals([...]) with these"
        )
    return result


def check_whole(
    engine: Any, load_dir: Any, tag: Any, *, module_only: bool, with_optimizer: bool, reads_latest: bool, say: Say
) -> str | None:
    """The tag that stock code may load: all of its files are as they were written, and hold data only. Collective.

    Args:
        engine: that is to load.
        load_dir: one folder for all ranks, or one on each host.
        tag: None: what `latest` names.
        module_only: the weights alone are loaded.
        with_optimizer: its shards are loaded, so that the world size and the parameters must be the same.
        reads_latest: stock code will read what `latest` names, whatever `tag` is.
        say: called with a line for rank 0.

    Returns:
        None if there is no `tag` and no `latest`, as stock code reports it.

    Raises:
        CheckpointError: on all ranks, naming the files.
    """
    if engine.load_universal_checkpoint():
        say("fp8: a universal checkpoint is not checked, and DeepSpeed executes the pickles in it")
        return None if tag is None else str(tag)
    # Stock code opens no file of the optimizer then: in stage 3 it takes the weights from them.
    module_only = module_only or (engine.zero_optimization() and not with_optimizer and not reads_latest)
    folder, asked, host = Path(load_dir), tag, _host(engine)
    readers = [rank for rank, other in enumerate(tell_all(host)) if other == host]
    manifest: Manifest | None = None

    def examine() -> tuple[str, list[str]]:
        nonlocal tag, manifest
        problems: list[str] = []
        try:
            tag, manifest, problems = _examine(
                engine, folder, asked, readers, module_only, with_optimizer, reads_latest
            )
        except CheckpointError as error:
            problems = [str(error)]
        except Exception as error:  # of a mount, say, on this rank alone: the others wait to hear of it
            problems = [f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}"]
        return _seen(tag, manifest), problems

    told = all_do("load_checkpoint", examine, say)
    found = [problem for entry in told for problem in entry[1]]
    if len(different := sorted({entry[0] for entry in told})) > 1 and not found:
        found = [f"ranks that see different checkpoints in {str(folder)!r}: {', '.join(different[:_NUM_SHOWN])}"]
    if found:
        shown = list(dict.fromkeys(found))
        reasons = "; ".join(shown[:_NUM_SHOWN]).rstrip(".")
        more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"load_checkpoint: expected a whole checkpoint that this run can load, got: {reasons}{more}. "
            f"Complete in {str(folder)!r}: {manifests.complete_tags(folder)}."
        )
    if tag is not None and manifest is None:
        say(
            f"fp8: {folder / tag} has no {manifests.MANIFEST}: not written by save_checkpoint of fp8_ds, or converted "
            "since. Its files are not checked, and DeepSpeed executes the pickles in them"
        )
    elif manifest is not None and (other := manifests.differs(manifest.header, versions(), tuple(versions()))):
        say(f"fp8: the checkpoint was written by other versions: {other}")
    return tag


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
    return _Part(recorder.tag, save_id, _host(engine), files or {}, unknown, recorder.error)


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


def _examine(
    engine: Any,
    folder: Path,
    tag: Any,
    readers: Collection[int],
    module_only: bool,
    with_optimizer: bool,
    reads_latest: bool,
) -> tuple[str | None, Manifest | None, list[str]]:
    """The tag to load, its manifest, and what is wrong with this rank's share of it. Not collective: it may raise."""
    latest = folder / manifests.LATEST
    newest = latest.read_text(errors="replace").strip() if latest.is_file() else None
    tag = newest if tag is None else str(tag)
    if tag is None:
        return None, None, []
    if not tag:
        raise CheckpointError(f"{latest} is empty")
    is_newest, tag = tag == newest, manifests.find(folder, tag)
    manifest = _read_manifest(folder, tag)
    if reads_latest and not is_newest:
        raise CheckpointError(
            f"tag {tag} where {latest} names {newest}: stage 3 without optimizer states reads the latter"
        )
    if manifest is None:
        return tag, None, []
    return tag, manifest, _problems(engine, folder, tag, manifest, readers, module_only, with_optimizer)


def _seen(tag: Any, manifest: Manifest | None) -> str:
    """Which save this rank would load, the same text on ranks that would load the same one."""
    if manifest is None:
        return f"{tag} without a manifest"
    return f"{tag} of step {manifest.header.get('global_steps')} (save {manifest.header.get('save')})"


def _read_manifest(folder: Path, tag: str) -> Manifest | None:
    """Of checkpoint `tag`.

    Raises:
        CheckpointError: there is no such checkpoint, or its save did not end.
    """
    path = folder / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing")
    if path.name.endswith(manifests.INCOMPLETE):
        raise CheckpointError(f"{path} is of a save that did not end")
    return manifests.read_manifest(path)


def _problems(
    engine: Any,
    folder: Path,
    tag: str,
    manifest: Manifest,
    readers: Collection[int],
    module_only: bool,
    with_optimizer: bool,
) -> list[str]:
    """What is wrong with this rank's share of the files, and with what it would load itself."""
    if other := other_run(engine, manifest.header, with_optimizer):
        return [other]
    path, rank = folder / tag, dist.get_rank()
    if module_only:
        files = {name: entry for name, entry in manifest.files.items() if not name.endswith("optim_states.pt")}
    else:
        files = manifest.files
    found = []
    for name in manifests.share_out(files, readers)[rank]:
        if problem := manifests.damage(path, name, files[name]):
            found.append(problem)
            continue
        try:
            read_structure(path / name, deepspeed_classes())
        except CheckpointError as error:
            found.append(str(error))
    if _leads(engine):  # stock code takes any file of such a name
        present = {file.relative_to(path).as_posix() for file in path.rglob("*_states.pt")}
        found += [f"{path / name} is not in {manifests.MANIFEST}" for name in sorted(present - manifest.files.keys())]
    if with_optimizer:  # with disks of their own, ranks may have moved to other hosts
        own = Path(engine._get_zero_ckpt_name(str(folder), tag))
        if own.relative_to(path).as_posix() not in files:
            found.append(f"{own} of rank {rank} is not in {path / manifests.MANIFEST}")
    if with_optimizer and not found and (problem := other_parameters(engine, folder, tag)):
        found.append(problem)
    return found


def _header(engine: Any, tag: str) -> dict[str, Any]:
    return {"tag": tag, "global_steps": engine.global_steps, **layout(engine), **versions()}


def _host(engine: Any) -> int:
    """Ranks of the same number see the same folder."""
    return dist.get_rank() - engine.local_rank if engine.use_node_local_storage() else 0


def _leads(engine: Any) -> bool:
    return dist.get_rank() == _host(engine)
