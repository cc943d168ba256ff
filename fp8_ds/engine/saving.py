"""Checkpoints that are whole or not there: DeepSpeed writes and reads the files, this says when they count.

A save: stock code writes into `TAG.incomplete` and every rank checksums its own files; all ranks tell each other; one
writes the manifest and renames (fp8_ds/checkpoint/manifest.py). A failure on any rank is an error on all, and the
checkpoint before is untouched. A load: files are shared out over the ranks, which compare checksums and read each
pickle without executing it; only then does stock code open one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.contents import read_structure, unknown_names
from fp8_ds.checkpoint.manifest import Manifest
from fp8_ds.errors import CheckpointError

Say = Callable[[str], None]

_DEEPSPEEDS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes of which ZeRO's optimizer files hold objects."""
_NUM_SHOWN = 3


class Recorder:
    """DeepSpeed's checkpoint engine, which remembers what it wrote. A failure waits until all ranks can hear of it."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        self.paths: list[Path] = []
        self.error = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

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
    rank, folder = dist.get_rank(), Path(save_dir)
    recorder = Recorder(engine.checkpoint_engine)
    if _leads(engine):
        recorder.attempt(manifests.prepare, folder, tag)
    engine.checkpoint_engine = recorder
    try:
        result = write(tag + manifests.INCOMPLETE)
    finally:
        engine.checkpoint_engine = recorder.stock
    staging = folder / (tag + manifests.INCOMPLETE)
    files = recorder.attempt(
        lambda: {path.relative_to(staging).as_posix(): manifests.record(path, rank) for path in recorder.paths}
    )
    unknown = [name for path in recorder.paths if not recorder.error for name in unknown_names(path, _DEEPSPEEDS)]
    told = _tell_all((tag, _host(engine), recorder.error, files or {}, unknown, uuid4().hex))
    tags = sorted({entry[0] for entry in told})
    failed = [f"rank {i}: {entry[2]}" for i, entry in enumerate(told) if entry[2]]
    if len(tags) > 1:
        failed.append(f"tags {tags[:_NUM_SHOWN]}")
    if not failed:
        if _leads(engine):
            of_host = [entry[3] for entry in told if entry[1] == _host(engine)]
            written = {name: entry for each in of_host for name, entry in each.items()}
            manifest = Manifest({**_header(engine, tag), "save": told[0][5]}, written)
            recorder.attempt(manifests.commit, folder, tag, manifest, is_latest=is_latest)
        failed = [f"rank {i}: {error}" for i, error in enumerate(_tell_all(recorder.error)) if error]
    if failed:
        if _leads(engine):
            manifests.discard(folder, tag)
        raise CheckpointError(
            f"save_checkpoint: expected every rank to write its part of {str(folder / tag)!r}, got "
            f"{'; '.join(failed[:_NUM_SHOWN])}. Make room or choose another folder; older checkpoints are untouched."
        )
    if names := sorted({name for entry in told for name in entry[4]}):
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
        module_only: files of the optimizer need not be there.
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
    folder, manifest = Path(load_dir), None
    problems: list[str] = []
    try:
        tag, manifest, problems = _examine(engine, folder, tag, module_only, with_optimizer, reads_latest)
    except CheckpointError as error:
        problems = [str(error)]
    except Exception as error:  # of a mount, say, on this rank alone: the others wait to hear of it
        problems = [f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}"]
    told = _tell_all((_seen(tag, manifest), problems))
    found = [problem for entry in told for problem in entry[1]]
    if len(different := sorted({entry[0] for entry in told})) > 1 and not found:
        found = [f"ranks that see different checkpoints in {str(folder)!r}: {', '.join(different[:_NUM_SHOWN])}"]
    if found:
        shown = list(dict.fromkeys(found))
        more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"load_checkpoint: expected a whole checkpoint that this run can load, got: "
            f"{'; '.join(shown[:_NUM_SHOWN])}{more}. Complete in {str(folder)!r}: {manifests.complete_tags(folder)}."
        )
    if tag is not None and manifest is None:
        say(
            f"fp8: {folder / tag} has no {manifests.MANIFEST}: not written by save_checkpoint of fp8_ds, or converted "
            "since. Its files are not checked, and DeepSpeed executes the pickles in them"
        )
    elif manifest is not None and (other := manifests.differs(manifest.header, _versions(), tuple(_versions()))):
        say(f"fp8: the checkpoint was written by other versions: {other}")
    return tag


# --- parts ---


def _examine(
    engine: Any, folder: Path, tag: Any, module_only: bool, with_optimizer: bool, reads_latest: bool
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
    return tag, manifest, _problems(engine, folder, tag, manifest, module_only, with_optimizer)


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
    engine: Any, folder: Path, tag: str, manifest: Manifest, module_only: bool, with_optimizer: bool
) -> list[str]:
    """What is wrong with this rank's share of the files, and with what it would load itself."""
    if other := _other_run(engine, manifest.header, with_optimizer):
        return [other]
    path, rank, world = folder / tag, dist.get_rank(), dist.get_world_size()
    if module_only:
        files = {name: entry for name, entry in manifest.files.items() if not name.endswith("optim_states.pt")}
    else:
        files = manifest.files
    found = []
    for name, entry in files.items():
        if entry.rank % world != rank:
            continue
        if problem := manifests.damage(path, name, entry):
            found.append(problem)
            continue
        try:
            read_structure(path / name, _DEEPSPEEDS)
        except CheckpointError as error:
            found.append(str(error))
    if _leads(engine):  # stock code takes any file of such a name
        present = {file.relative_to(path).as_posix() for file in path.rglob("*_states.pt")}
        found += [f"{path / name} is not in {manifests.MANIFEST}" for name in sorted(present - manifest.files.keys())]
    if with_optimizer:  # with disks of their own, ranks may have moved to other hosts
        own = Path(engine._get_zero_ckpt_name(str(folder), tag))
        if own.relative_to(path).as_posix() not in files:
            found.append(f"{own} of rank {rank} is not in {path / manifests.MANIFEST}")
    if with_optimizer and not found and (problem := _other_parameters(engine, folder, tag)):
        found.append(problem)
    return found


def _other_run(engine: Any, header: dict[str, Any], with_optimizer: bool) -> str:
    """How the run that wrote `header` was laid out unlike this one; empty if what is to be loaded fits."""
    now = _layout(engine)
    shards = now["zero_stage"] == 3
    if (header["zero_stage"] == 3) != shards:
        stage = manifests.differs(header, now, ("zero_stage",))
        return f"{stage} (make it universal, then `python -m fp8_ds.checkpoint.universal`: docs/checkpoints.md)"
    keys = ("dp_world_size", "mp_world_size") if with_optimizer else ("mp_world_size",)
    other = manifests.differs(header, now, keys)
    if not other and shards and now["dp_world_size"] > header["dp_world_size"]:
        other = manifests.differs(header, now, ("dp_world_size",))
    return f"{other} (a universal checkpoint loads at any world size: docs/checkpoints.md)" if other else ""


def _other_parameters(engine: Any, folder: Path, tag: str) -> str:
    """How the parameters in this rank's model file differ from the engine's. ZeRO's flat shards do not say."""
    path = Path(engine._get_ckpt_name(str(folder), tag))
    saved = read_structure(path, _DEEPSPEEDS).get("param_shapes")
    if saved is None:
        return ""
    groups = engine._get_zero_param_shapes()
    theirs, ours = [
        [{name: list(shape) for name, shape in group.items()} for group in side] for side in (saved, groups)
    ]
    # Order counts: shards are cut from one flat tensor.
    if [list(group.items()) for group in theirs] == [list(group.items()) for group in ours]:
        return ""
    before, now = [{name: shape for group in side for name, shape in group.items()} for side in (theirs, ours)]
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return f"{path} has the model's parameters in another order or in other groups"
    shown = ", ".join(
        f"{name} {before.get(name, 'missing')} in the checkpoint, {now.get(name, 'missing')} now"
        for name in names[:_NUM_SHOWN]
    )
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{path} is of another model: {shown}{more}"


def _versions() -> dict[str, str]:
    import fp8_ds

    return {"fp8_ds": fp8_ds.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}


def _layout(engine: Any) -> dict[str, int]:
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "dp_world_size": engine.seq_dp_world_size,
        "mp_world_size": engine.mp_world_size,
    }


def _header(engine: Any, tag: str) -> dict[str, Any]:
    return {"tag": tag, "global_steps": engine.global_steps, **_layout(engine), **_versions()}


def _host(engine: Any) -> int:
    """Ranks of the same number see the same folder."""
    return dist.get_rank() - engine.local_rank if engine.use_node_local_storage() else 0


def _leads(engine: Any) -> bool:
    return dist.get_rank() == _host(engine)


def _tell_all(mine: Any) -> list[Any]:
    """By rank, what each passed. Collective over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
