"""A checkpoint is checked before stock code, which executes pickles, opens a file of it.

All ranks first agree which save they load. Then its files are shared out over the ranks (of a host, with disks of their
own) by size, which compare checksums where there is a manifest, and read each pickle without executing it. What one
rank finds is an error on all. Ranks wait for each other as in waiting.py.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.adopt import GLOBAL_STATE
from fp8_ds.checkpoint.contents import deepspeed_classes, read_data, read_structure
from fp8_ds.checkpoint.manifest import Manifest
from fp8_ds.checkpoint.state import CHECKPOINT_KEY, FOLLOWING_KEY, wrong_entries
from fp8_ds.checkpoint.universal import TENSORS
from fp8_ds.engine.cut_models import lacks_info
from fp8_ds.engine.fit import in_form_of, other_parameters, other_run, other_universal
from fp8_ds.engine.saving import host_of, is_first_of_host
from fp8_ds.engine.waiting import Say, all_do, tell_all
from fp8_ds.errors import CheckpointError, ConfigError

_NUM_SHOWN = 3


@dataclass(frozen=True)
class _Request:
    """What a load was asked for; see `check_whole`. `skips_optimizer`: stock code opens no file of the optimizer."""

    folder: Path
    tag: str | None
    is_universal: bool
    skips_optimizer: bool
    with_optimizer: bool
    reads_latest: bool


@dataclass(frozen=True)
class _Choice:
    """The save that this rank would load: its tag (None: there is none), and its manifest if it has one."""

    tag: str | None
    manifest: Manifest | None = None

    def __str__(self) -> str:
        """The same on ranks that would load the same save, whatever its folder is called there."""
        if self.manifest is None:
            return f"{self.tag} without a manifest"
        header = self.manifest.header
        return f"{header.get('tag')} of step {header.get('global_steps')} (save {header.get('save')})"


def check_whole(
    engine: Any,
    load_dir: Any,
    tag: Any,
    *,
    module_only: bool,
    of_another_run: bool,
    with_optimizer: bool,
    reads_latest: bool,
    say: Say,
) -> str | None:
    """The tag that stock code may load: all of its files are as they were written, and hold data only. Collective.

    Args:
        engine: that is to load.
        load_dir: one folder for all ranks, or one on each host.
        tag: None: what `latest` names, or `latest_universal`.
        module_only: the weights alone are loaded.
        of_another_run: our state is not taken over.
        with_optimizer: its shards are loaded, so that the world size and the parameters must be the same.
        reads_latest: stock code will read what `latest` names, whatever `tag` is.
        say: called with a line for rank 0.

    Returns:
        None if there is no `tag` and no `latest`, as stock code reports it.

    Raises:
        CheckpointError: on all ranks, naming the files.
        ConfigError: our state in them is of an unknown version, on all ranks.
    """
    is_universal = bool(engine.load_universal_checkpoint())
    # Stock code opens no file of the optimizer then: in stage 3 it takes the weights from them.
    skips_optimizer = module_only or (engine.zero_optimization() and not with_optimizer and not reads_latest)
    asked = None if tag is None else str(tag)
    request = _Request(Path(load_dir), asked, is_universal, skips_optimizer, with_optimizer, reads_latest)
    host = host_of(engine)
    readers = [rank for rank, other in enumerate(tell_all(host)) if other == host]
    choice = _agree(engine, request, say)
    if choice.tag is None:
        return None
    find_problems = _found(lambda: _problems(engine, request, choice, readers))
    problems = [problem for found in all_do("load_checkpoint", find_problems, say) for problem in found]
    _refuse(request.folder, problems, choice.tag)
    _refuse_wrong_state(engine, request, choice.tag, of_another_run, say)
    if choice.manifest is None:
        say(
            f"fp8: {request.folder / choice.tag} has no {manifests.MANIFEST}: not written by fp8_ds. Its pickles hold "
            "data only, but whether its bytes are those that were written is not known"
        )
    elif other := manifests.differs(choice.manifest.header, now := manifests.versions(), tuple(now)):
        say(f"fp8: the checkpoint was written by other versions: {other}")
    return choice.tag


def _refuse(folder: Path, found: list[str], tag: str | None = None) -> None:
    """An error of all ranks, if anything has been found; of the save `tag`, which is not named as complete then."""
    if not found:
        return
    shown = list(dict.fromkeys(found))
    reasons = "; ".join(shown[:_NUM_SHOWN]).rstrip(".")
    more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    raise CheckpointError(
        f"load_checkpoint: expected a whole checkpoint that this run can load, got: {reasons}{more}. "
        f"{folders.describe_complete(folder, tag)}"
    )


def _found(examine: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """`examine`, in whose list is what it raises: the other ranks wait to hear of it."""

    def run() -> list[str]:
        try:
            return examine()
        except CheckpointError as error:
            return [str(error)]
        except Exception as error:  # of a mount, say, on this rank alone
            return [f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}"]

    return run


# --- which save ---


def _agree(engine: Any, request: _Request, say: Say) -> _Choice:
    """What all ranks load: what they were asked for, or what hosts with disks of their own have in common. Collective.

    Raises:
        CheckpointError: there is no such checkpoint, or ranks see different ones.
    """
    choice = _Choice(None)

    def choose() -> list[str]:
        nonlocal choice
        choice = _choose(request)
        return []

    examine = _found(choose)
    told: list[tuple[list[str], str, str | None]] = all_do(
        "load_checkpoint", lambda: (examine(), str(choice), choice.tag), say
    )
    _refuse(request.folder, [problem for found, _, _ in told for problem in found], _asked(request))
    different = sorted({seen for _, seen, _ in told})
    if len(different) == 1:
        return choice
    common: _Choice | None = None
    if engine.use_node_local_storage():
        tags = {tag.removesuffix(folders.REPLACED) for _, _, tag in told if tag is not None}
        common = _common(request.folder, sorted(tags), say)
    if common is None:
        shown = ", ".join(different[:_NUM_SHOWN])
        _refuse(request.folder, [f"ranks that see different checkpoints in {str(request.folder)!r}: {shown}"])
    assert common is not None
    say(f"fp8: a save was killed before all hosts had ended it; {common} is the newest that all of them have")
    return common


def _common(folder: Path, tags: list[str], say: Say) -> _Choice | None:
    """The newest save of `tags` that every host has, if there is one. Collective."""
    mine: dict[str, folders.Save] = {}

    def saves() -> dict[str, int]:
        mine.update(folders.complete_saves(folder, tags))
        return {name: save.written for name, save in mine.items()}

    name = folders.common_save(all_do("load_checkpoint", saves, say))
    return None if name is None else _Choice(mine[name].tag, mine[name].manifest)


def _choose(request: _Request) -> _Choice:
    """What this rank was asked for. Not collective.

    Raises:
        CheckpointError: there is no such checkpoint, or its save did not end.
    """
    tag = _asked(request)
    if tag is None:
        return _Choice(None)
    if not tag and request.tag is None:
        raise CheckpointError(f"{_latest(request)} is empty")
    if request.tag is None:
        manifests.refuse_paths([tag], _latest(request))
    tag = folders.find(request.folder, tag)
    path = request.folder / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing")
    _refuse_pattern(path)
    if path.name.endswith(folders.INCOMPLETE):
        raise CheckpointError(f"{path} is of a save that did not end")
    return _Choice(tag, manifests.read_manifest(path))


def _refuse_pattern(path: Path) -> None:
    """Stock code takes the names of folders for patterns: of `a[b]` it opens the files of `ab`, which nobody checked.

    Raises:
        CheckpointError: `path` is a pattern of others.
    """
    if glob.has_magic(str(path)) and (found := glob.glob(str(path))) != [str(path)]:
        raise CheckpointError(f"{path} is to DeepSpeed a pattern of names, of {found or 'no folder'} (rename it)")


def _asked(request: _Request) -> str | None:
    return _named_by(_latest(request)) if request.tag is None else request.tag


def _latest(request: _Request) -> Path:
    return request.folder / (folders.LATEST_UNIVERSAL if request.is_universal else folders.LATEST)


def _named_by(latest: Path) -> str | None:
    return latest.read_text(errors="replace").strip() if latest.is_file() else None


# --- what is wrong with it ---


def _problems(engine: Any, request: _Request, choice: _Choice, readers: Collection[int]) -> list[str]:
    """What is wrong with this rank's share of the files, and with what it would load itself. It may raise."""
    assert choice.tag is not None
    path, manifest = request.folder / choice.tag, choice.manifest
    if other := _other_kind(engine, request, choice):
        return [other]
    present = manifests.files_in(path, ".pt" if request.is_universal else "_states.pt")
    files: Mapping[str, int] = present
    if manifest is not None:
        files = {name: entry.num_bytes for name, entry in manifest.files.items()}
    if request.skips_optimizer and not request.is_universal:
        files = {name: size for name, size in files.items() if not name.endswith("optim_states.pt")}
    found = []
    for name in manifests.share_out(files, readers)[dist.get_rank()]:
        if problem := _problem(path, name, manifest, request.is_universal):
            found.append(problem)
    if manifest is not None and is_first_of_host(engine):  # stock code takes any file of such a name
        found += [f"{path / name} is not in {manifests.MANIFEST}" for name in sorted(present - manifest.files.keys())]
    if request.is_universal:
        return found + _misfits(engine, request, path) + _problems_of_latest(request, readers)
    if manifest is not None and request.with_optimizer:
        found += _problems_of_rank(engine, request, choice, files, found)
    return found


def _other_kind(engine: Any, request: _Request, choice: _Choice) -> str:
    """Why the checkpoint is none that this load takes, whatever its files hold; empty if it is one."""
    path, manifest = request.folder / str(choice.tag), choice.manifest
    if request.is_universal:
        return "" if (path / GLOBAL_STATE).is_file() else f"{path / GLOBAL_STATE} is missing"
    if (path / GLOBAL_STATE).is_file():
        return f'{path} is a universal checkpoint (to load it, set "checkpoint": {{"load_universal": true}})'
    if manifest is not None and (other := other_run(engine, manifest.header, request.with_optimizer)):
        return other
    latest = request.folder / folders.LATEST
    if request.reads_latest and choice.tag != (newest := _named_by(latest)):
        return f"tag {choice.tag} where {latest} names {newest}: stage 3 without optimizer states reads the latter"
    return ""


def _problem(path: Path, name: str, manifest: Manifest | None, is_universal: bool) -> str:
    """What is wrong with one file; empty if nothing is."""
    if manifest is not None and (problem := manifests.damage(path, name, manifest.files[name])):
        return problem
    try:
        content = read_structure(path / name, deepspeed_classes())
    except CheckpointError as error:
        return str(error)
    if manifest is None and not is_universal and isinstance(content, dict) and CHECKPOINT_KEY in content:
        return manifests.lacks_manifest(path)
    return ""


def _problems_of_rank(
    engine: Any, request: _Request, choice: _Choice, files: Collection[str], found: list[str]
) -> list[str]:
    """Of the optimizer's shard that this rank loads: with disks of their own, ranks may have moved to other hosts."""
    path = request.folder / str(choice.tag)
    own = Path(engine._get_zero_ckpt_name(str(request.folder), choice.tag))
    if own.relative_to(path).as_posix() not in files:
        return [f"{own} of rank {dist.get_rank()} is not in {path / manifests.MANIFEST}"]
    if not found and (problem := other_parameters(engine, request.folder, str(choice.tag))):
        return [problem]
    return []


def _misfits(engine: Any, request: _Request, path: Path) -> list[str]:
    """List what this rank would look for in a universal checkpoint in vain, or find in other shapes than its own.

    In stages 1 and 2 a parameter that has had no gradient has no moments.
    """
    if not (model_files := engine._get_all_ckpt_names(str(request.folder), path.name)):
        stage = int(engine.zero_optimization_stage())
        return [f"a model file of this ZeRO stage is missing in {path} ({in_form_of(path, stage)}, if it is whole)"]
    if lacks_info(engine.module, Path(model_files[0])):
        return [
            f"{path} of a whole model, which does not say how fp8_ds.tp.parallelize cuts its weights (load it without, "
            "or start the cut model from the weights themselves)"
        ]
    if not engine.zero_optimization():
        return []
    tensors = TENSORS if engine.zero_optimization_partition_weights() and request.with_optimizer else TENSORS[:1]
    names = [name for group in engine._get_zero_param_shapes() for name in group]
    wanted = [path / "zero" / name / tensor for name in names for tensor in tensors]
    if missing := [f"{file} is missing" for file in wanted if not file.is_file()]:
        return missing
    other = other_universal(engine, path, Path(model_files[0]))
    return [other] if other else []


def _refuse_wrong_state(engine: Any, request: _Request, tag: str, of_another_run: bool, say: Say) -> None:
    """Each rank looks at our state in the model file that it will load; of a universal save, in each that it may.
    Collective.

    Args:
        of_another_run: nothing but the version and the layers of it are read then.

    Raises:
        CheckpointError: an entry is none that a save writes: on all ranks, naming file and entry.
        ConfigError: it is of an unknown version: on all ranks.
    """
    other_version = ""

    def examine() -> list[str]:
        nonlocal other_version
        paths = [path for path in map(Path, names(str(request.folder), tag)) if path.is_file()]
        try:
            return [f"{path}: {text}" for path in paths for text in _wrong_state(engine, request, path, of_another_run)]
        except ConfigError as error:
            other_version = str(error)
            return []

    names = engine._get_all_ckpt_names if request.is_universal else lambda *place: [engine._get_ckpt_name(*place)]
    work = _found(examine)
    told: list[tuple[list[str], str]] = all_do("load_checkpoint", lambda: (work(), other_version), say)
    _refuse(request.folder, [problem for found, _ in told for problem in found], tag)
    if versions := [version for _, version in told if version]:
        raise ConfigError(versions[0])


def _wrong_state(engine: Any, request: _Request, path: Path, of_another_run: bool) -> list[str]:
    """List what is wrong with our state in the model file `path`; raises as `wrong_entries`."""
    context, following = engine.fp8 or engine._fp8_unused, engine._fp8_following
    content = read_data(path, deepspeed_classes(), is_mapped=True)
    if context is None or not isinstance(content, Mapping) or CHECKPOINT_KEY not in content:
        return []
    state = content[CHECKPOINT_KEY]
    wrong = wrong_entries(
        context,
        state,
        module_only=of_another_run,
        with_optimizer=request.with_optimizer,
        of_other_cuts=request.is_universal,
    )
    if not wrong and not of_another_run and following is not None:
        problem = following.wrong_state(state.get(FOLLOWING_KEY))
        wrong = [f"{CHECKPOINT_KEY}[{FOLLOWING_KEY!r}]: expected what a save writes, got {problem}"] if problem else []
    return wrong


def _problems_of_latest(request: _Request, readers: Collection[int]) -> list[str]:
    """Of what `latest` names, where stock code reads that beside the universal checkpoint."""
    newest = _named_by(request.folder / folders.LATEST) if request.reads_latest else None
    if not newest:
        return []
    manifests.refuse_paths([newest], request.folder / folders.LATEST)
    path = request.folder / newest
    _refuse_pattern(path)
    shares = manifests.share_out(manifests.files_in(path, "_states.pt"), readers)
    return [problem for name in shares[dist.get_rank()] if (problem := _problem(path, name, None, True))]
