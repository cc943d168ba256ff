"""A checkpoint is checked before stock code, which executes pickles, opens a file of it.

All ranks first agree which save they load. Then its files are shared out over the ranks (of a host, with disks of their
own), which compare checksums where there is a manifest, and read each pickle without executing it. What one rank finds
is an error on all.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.contents import deepspeed_classes, read_data, read_structure
from fp8_ds.checkpoint.folders import GLOBAL_STATE, MANIFEST, Manifest
from fp8_ds.checkpoint.state import CHECKPOINT_KEY, FOLLOWING_KEY, wrong_entries
from fp8_ds.engine.fit import differs, misfits, missing_layers, other_parameters, other_run
from fp8_ds.engine.saving import Say, all_do, host_of, tell_all
from fp8_ds.errors import CheckpointError, ConfigError

_NUM_SHOWN = 3


@dataclass(frozen=True)
class Load:
    """What a load was asked for.

    Attributes:
        tag: None: what `latest` names, or `latest_universal`.
        module_only: the weights alone are loaded; `of_another_run`: our state is not taken over.
        with_optimizer: its shards are loaded, so that the world size and the parameters must be the same.
        reads_latest: stock code will read what `latest` names, whatever `tag` is.
    """

    engine: Any
    folder: Path
    tag: str | None
    module_only: bool
    of_another_run: bool
    with_optimizer: bool
    reads_latest: bool

    @property
    def is_universal(self) -> bool:
        return bool(self.engine.load_universal_checkpoint())

    @property
    def skips_optimizer(self) -> bool:
        """Whether stock code opens no file of the optimizer. In stage 3 it takes the weights from them."""
        of_zero = self.engine.zero_optimization() and not self.is_universal
        return self.module_only or (of_zero and not self.with_optimizer and not self.reads_latest)

    @property
    def latest(self) -> Path:
        return self.folder / (folders.LATEST_UNIVERSAL if self.is_universal else folders.LATEST)

    def asked(self) -> str | None:
        return _named_by(self.latest) if self.tag is None else self.tag


@contextlib.contextmanager
def checked(load: Load, say: Say) -> Iterator[str | None]:
    """Give the tag that stock code may load: all of its files are as they were written, and hold data only; saves of
    other jobs wait until all ranks have loaded. None where there is no `tag` and no `latest`. Collective.

    Raises:
        CheckpointError: on all ranks, naming the files.
        ConfigError: our state in them is of an unknown version, on all ranks.
    """
    locks: list[int | None] = []
    try:
        if (choice := _agree(load, locks, say)) is None:
            yield None
            return
        tag, manifest = choice
        hosts = tell_all(host_of(load.engine))
        readers = [rank for rank, host in enumerate(hosts) if host == host_of(load.engine)]
        told, problems = all_do("load_checkpoint", lambda: _problems(load, tag, manifest, readers), say)
        found = [problem for problems_of_rank in told for problem in problems_of_rank or ()]
        _refuse(load.folder, problems + [text for text in found if isinstance(text, str)], tag)
        if found:
            raise next(error for error in found if isinstance(error, ConfigError))
        if manifest is None:
            say(
                f"fp8: {load.folder / tag} has no {MANIFEST}: all files that it counts are there and hold data only, "
                "but whether their bytes are those that were written is not known"
            )
        elif other := differs(manifest.header, now := folders.versions(), tuple(now)):
            say(f"fp8: the checkpoint was written by other versions: {other}")
        yield tag
        tell_all(None)
    finally:
        for lock in locks:
            if lock is not None:
                os.close(lock)


def _refuse(folder: Path, found: list[str], tag: str | None = None) -> None:
    """An error of all ranks, if anything has been found; of the save `tag`, which is not named as complete then."""
    if shown := list(dict.fromkeys(found)):
        reasons = "; ".join(shown[:_NUM_SHOWN]).rstrip(".")
        more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"load_checkpoint: expected a whole checkpoint that this run can load, got: {reasons}{more}. "
            f"{folders.describe_complete(folder, tag)}"
        )


# --- which save ---


def _agree(load: Load, locks: list[int | None], say: Say) -> tuple[str, Manifest | None] | None:
    """Choose what all ranks load: what they were asked for, or what hosts with disks of their own have in common.
    Collective.

    Raises:
        CheckpointError: there is no such checkpoint, its save did not end, or ranks see different ones.
    """
    rank, host = dist.get_rank(), host_of(load.engine)
    mine: dict[str, tuple[str, Manifest | None]] = {}

    def ask() -> str | None:
        if rank == host:
            locks.append(folders.take_lock(load.folder, f"{host or ''}", say, is_shared=True))
        if (tag := load.asked()) == "" and load.tag is None:
            raise CheckpointError(f"{load.latest} is empty")
        if tag is not None and load.tag is None:
            folders.refuse_paths([tag], load.latest)
        return tag

    def look() -> list[str]:
        for tag in dict.fromkeys(tag for tag in (tags[rank], *tags) if tag is not None):
            with contextlib.suppress(*[] if tag == tags[rank] else [CheckpointError]):
                for name, save in _saves(load.folder, tag).items():
                    mine.setdefault(name, save)
        return list(mine)

    tags, failed = all_do("load_checkpoint", ask, say)
    told, problems = all_do("load_checkpoint", look, say) if not failed else ([], failed)
    _refuse(load.folder, problems, tags[rank])
    if not any(told):
        return None
    firsts = {names[0] if names else "none" for names in told}
    common = [name for name in told[0] if all(name in names for names in told)]
    if len(firsts) > 1 and not (common and load.engine.use_node_local_storage()):
        shown = ", ".join(sorted(firsts)[:_NUM_SHOWN])
        _refuse(load.folder, [f"ranks that see different checkpoints in {str(load.folder)!r}: {shown}"])
    if len(firsts) > 1:
        say(f"fp8: a save was killed before all hosts had ended it; {common[0]} is one that all of them have")
    return mine[common[0]]


def _saves(folder: Path, tag: str) -> dict[str, tuple[str, Manifest | None]]:
    """Find the saves of `tag` on this rank's disk, by what names them on all: their folders' names and manifests.

    Raises:
        CheckpointError: the first of them, which is the one to load, is none.
    """
    found: dict[str, tuple[str, Manifest | None]] = {}
    for name in folders.folders_of(folder, tag):
        path = folder / name
        with contextlib.suppress(*[CheckpointError] * bool(found)):
            if not path.is_dir():
                raise CheckpointError(f"{path} is missing")
            _refuse_pattern(path)
            if name.endswith(folders.INCOMPLETE):
                raise CheckpointError(f"{path} is of a save that did not end")
            manifest = folders.read_manifest(path)
            found.setdefault(f"{name} without a manifest" if manifest is None else str(manifest), (name, manifest))
    return found


def _refuse_pattern(path: Path) -> None:
    """Stock code takes the names of folders for patterns: of `a[b]` it opens the files of `ab`, which nobody checked.

    Raises:
        CheckpointError: `path` is a pattern of others.
    """
    if glob.has_magic(str(path)) and (found := glob.glob(str(path))) != [str(path)]:
        raise CheckpointError(f"{path} is to DeepSpeed a pattern of names, of {found or 'no folder'} (rename it)")


def _named_by(latest: Path) -> str | None:
    return latest.read_text(errors="replace").strip() if latest.is_file() else None


# --- what is wrong with it ---


def _problems(load: Load, tag: str, manifest: Manifest | None, readers: list[int]) -> list[str | ConfigError]:
    """List what is wrong with this rank's share of the files, and with what it would load itself. It may raise."""
    engine, path = load.engine, load.folder / tag
    header: dict[str, Any] = {} if manifest is None else manifest.header
    if manifest is None and not load.is_universal and not (path / GLOBAL_STATE).exists():
        header = folders.read_header(path)
    if other := _other_kind(load, tag, header):
        return [other]
    present = folders.own_files(path)
    sizes = present if manifest is None else {name: entry.num_bytes for name, entry in manifest.files.items()}
    if load.skips_optimizer and not load.is_universal:
        sizes = {name: size for name, size in sizes.items() if not name.endswith("optim_states.pt")}
    found = [text for name in _share(sizes, readers) if (text := _problem(path, name, manifest))]
    if manifest is not None and dist.get_rank() == readers[0]:  # stock code takes any file of such a name
        found += [f"{path / name} is not in {MANIFEST}" for name in sorted(present - manifest.files.keys())]
    if load.is_universal:
        found += misfits(engine, path, load.with_optimizer) + _problems_of_latest(load, readers)
    elif manifest is None:
        if not engine.use_node_local_storage():
            found += folders.missing_files(path, header, weights_alone=load.skips_optimizer)
        found += missing_layers(engine, path)
    if not load.is_universal and load.with_optimizer and (manifest is not None or header["of_optimizer"]):
        own = Path(engine._get_zero_ckpt_name(str(load.folder), tag))
        if own.name not in sizes:  # with disks of their own, ranks may have moved to other hosts
            found.append(f"{own} of rank {dist.get_rank()} is not in {path / MANIFEST if manifest else path}")
        elif not found and (other := other_parameters(engine, load.folder, tag)):
            found.append(other)
    return [*found] if found else _wrong_state(load, tag)


def _share(sizes: Mapping[str, int], readers: list[int]) -> list[str]:
    """The files that this rank reads: each has one reader, and none reads more than the mean and one file."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[readers.index(dist.get_rank()) :: len(readers)]


def _problem(path: Path, name: str, manifest: Manifest | None) -> str:
    """Describe what is wrong with one file; empty if nothing is."""
    if manifest is not None and (problem := folders.damage(path, name, manifest.files[name])):
        return problem
    try:
        read_structure(path / name, deepspeed_classes())
    except CheckpointError as error:
        return str(error)
    return ""


def _other_kind(load: Load, tag: str, header: dict[str, Any]) -> str:
    """Say why the checkpoint is none that this load takes, whatever its files hold; empty if it is one."""
    path = load.folder / tag
    if load.is_universal:
        return "" if (path / GLOBAL_STATE).is_file() else f"{path / GLOBAL_STATE} is missing"
    if (path / GLOBAL_STATE).is_file():
        return f'{path} is a universal checkpoint (to load it, set "checkpoint": {{"load_universal": true}})'
    if other := other_run(load.engine, header, load.with_optimizer and header.get("of_optimizer", True)):
        return other
    latest = load.folder / folders.LATEST
    if load.reads_latest and tag != (newest := _named_by(latest)):
        return f"tag {tag} where {latest} names {newest}: stage 3 without optimizer states reads the latter"
    return ""


def _problems_of_latest(load: Load, readers: list[int]) -> list[str]:
    """List those of what `latest` names, where stock code reads that beside the universal checkpoint."""
    latest = load.folder / folders.LATEST
    if not load.reads_latest or not (newest := _named_by(latest)):
        return []
    folders.refuse_paths([newest], latest)
    _refuse_pattern(path := load.folder / newest)
    return [text for name in _share(folders.own_files(path), readers) if (text := _problem(path, name, None))]


def _wrong_state(load: Load, tag: str) -> list[str | ConfigError]:
    """List what is wrong with our state in the model file that this rank will load; of a universal checkpoint, in each
    that it may."""
    engine, place = load.engine, (str(load.folder), tag)
    context, following = engine.fp8 or engine._fp8_unused, engine._fp8_following
    options = {"module_only": load.of_another_run, "with_optimizer": load.with_optimizer}
    found: list[str | ConfigError] = []
    for path in map(Path, engine._get_all_ckpt_names(*place) if load.is_universal else [engine._get_ckpt_name(*place)]):
        content = read_data(path, deepspeed_classes(), is_mapped=True) if path.is_file() else None
        if context is None or not isinstance(content, Mapping) or CHECKPOINT_KEY not in content:
            continue
        state = content[CHECKPOINT_KEY]
        try:
            wrong = wrong_entries(context, state, of_other_cuts=load.is_universal, **options)
        except ConfigError as error:
            return [error]
        if not (wrong or load.of_another_run or following is None):
            problem = following.wrong_state(state.get(FOLLOWING_KEY))
            at = f"{CHECKPOINT_KEY}[{FOLLOWING_KEY!r}]"
            wrong = [f"{at}: expected what a save writes, got {problem}"] if problem else []
        found += [f"{path}: {text}" for text in wrong]
    return found
