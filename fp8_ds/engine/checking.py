"""Checks of a checkpoint before DeepSpeed, which executes pickles, opens a file of it.

All ranks agree on the save to load, and share out its files (among the ranks of a host, if hosts have their own disks)
to compare checksums and read each pickle as data. Each rank checks whether layout, parameters and our state fit it. A
finding of one rank is an error on all.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import CAT_DIM, PARAM, UNIVERSAL_CHECKPOINT_INFO, VOCAB_TENSOR
from deepspeed.runtime.pipe.module import PipelineModule

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.contents import read_data, read_structure
from fp8_ds.checkpoint.folders import GLOBAL_STATE, MANIFEST, TENSORS, Manifest
from fp8_ds.checkpoint.state import CALLBACKS_KEY, CHECKPOINT_KEY, wrong_entries
from fp8_ds.engine.ranks import all_do, say, say_problem, tell_all
from fp8_ds.engine.saving import host_of, layout
from fp8_ds.errors import CheckpointError, ConfigError
from fp8_ds.tp.linears import contexts_of

_NUM_SHOWN = 3
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"
"""DeepSpeed's attribute of parameters, from 0.19 on."""


@dataclass(frozen=True)
class Load:
    """A load of the checkpoint `tag` in `folder`; None means the one that `latest` names, or `latest_universal`."""

    engine: Any
    folder: Path
    tag: str | None
    load_module_only: bool
    load_optimizer_states: bool

    @property
    def is_universal(self) -> bool:
        return bool(self.engine.load_universal_checkpoint())

    @property
    def with_optimizer(self) -> bool:
        """Whether ZeRO's shards are loaded, so that the world size and the parameters must be the same."""
        return self.load_optimizer_states and not self.load_module_only and bool(self.engine.zero_optimization())

    @property
    def reads_latest(self) -> bool:
        """Whether DeepSpeed reads the save that `latest` names in any case: in stage 3 it takes weights from shards."""
        return not self.load_optimizer_states and bool(self.engine.zero_optimization_partition_weights())

    @property
    def skips_optimizer(self) -> bool:
        """Whether DeepSpeed opens no file of the optimizer."""
        if self.load_optimizer_states:
            return self.load_module_only
        return bool(self.engine.zero_optimization()) and not self.is_universal and not self.reads_latest


@contextlib.contextmanager
def checked(load: Load) -> Iterator[str | None]:
    """Yield the tag that DeepSpeed may load, None where there is no `tag` and no `latest`. Collective.

    Saves of other jobs wait until all ranks have loaded.

    Raises:
        CheckpointError: files are not as they were written, or hold more than data; on all ranks, with their names.
        ConfigError: our state in them is of an unknown version; on all ranks.
    """
    with contextlib.ExitStack() as locks:
        if (choice := _agree(load, locks)) is None:
            yield None
            return
        tag, manifest = choice
        hosts = tell_all(host_of(load.engine))
        readers = [rank for rank, host in enumerate(hosts) if host == host_of(load.engine)]
        told, problems = all_do("load_checkpoint", lambda: _problems(load, tag, manifest, readers))
        found = [problem for problems_of_rank in told for problem in problems_of_rank or ()]
        _refuse(load.folder, problems + [text for text in found if isinstance(text, str)], tag)
        if found:
            raise next(error for error in found if isinstance(error, ConfigError))
        if manifest is None:
            say_problem(
                f"fp8: {load.folder / tag} has no {MANIFEST}: all files that it counts are there and hold data only, "
                "but whether their bytes are those that were written is not known"
            )
        elif other := differs(manifest.header, now := folders.versions(), tuple(now)):
            say(f"fp8: the checkpoint was written by other versions: {other}")
        yield tag
        tell_all(None)


def _refuse(folder: Path, found: list[str], tag: str | None = None) -> None:
    """Raise a CheckpointError with what has been `found`, if anything; it names complete saves other than `tag`."""
    if shown := list(dict.fromkeys(found)):
        reasons = "; ".join(shown[:_NUM_SHOWN]).rstrip(".")
        more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"load_checkpoint: expected a whole checkpoint that this run can load, got: {reasons}{more}. "
            f"{folders.describe_complete(folder, tag)}"
        )


def _agree(load: Load, locks: contextlib.ExitStack) -> tuple[str, Manifest | None] | None:
    """Choose the save to load: the requested one, or one that all hosts have if each has its own disk."""
    rank, host = dist.get_rank(), host_of(load.engine)
    mine: dict[str, tuple[str, Manifest | None]] = {}

    def ask() -> str | None:
        if rank == host:
            locks.enter_context(folders.take_lock(load.folder, f"{host or ''}", say, is_shared=True))
        latest = folders.LATEST_UNIVERSAL if load.is_universal else folders.LATEST
        return folders.read_latest(load.folder / latest) if load.tag is None else load.tag

    def look() -> list[str]:
        """Find the saves of all tags on this rank's disk, and return names that are the same on all ranks."""
        for tag in dict.fromkeys(tag for tag in (tags[rank], *tags) if tag is not None):
            for name in folders.folders_of(load.folder, tag):
                try:
                    manifest = _manifest_of(load.folder / name)
                except CheckpointError:
                    if tag == tags[rank] and not mine:  # the one to load
                        raise
                else:
                    mine.setdefault(str(manifest or f"{name} without a manifest"), (name, manifest))
        return list(mine)

    tags, failed = all_do("load_checkpoint", ask)
    told, problems = all_do("load_checkpoint", look) if not failed else ([], failed)
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


def _manifest_of(path: Path) -> Manifest | None:
    """Read the manifest of the save in `path`, if it has one. Raise a CheckpointError if there is no whole save."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing")
    _refuse_pattern(path)
    if path.name.endswith(folders.INCOMPLETE):
        raise CheckpointError(f"{path} is of a save that did not end")
    return folders.read_manifest(path)


def _refuse_pattern(path: Path) -> None:
    """Refuse a folder whose name DeepSpeed takes for a pattern: for `a[b]` it opens the files of `ab`, unchecked."""
    if glob.has_magic(str(path)) and (found := glob.glob(str(path))) != [str(path)]:
        raise CheckpointError(f"{path} is to DeepSpeed a pattern of names, of {found or 'no folder'} (rename it)")


def _problems(load: Load, tag: str, manifest: Manifest | None, readers: list[int]) -> list[str | ConfigError]:
    """List the problems of this rank's share of the files, and of those that it would load itself. It may raise."""
    engine, path = load.engine, load.folder / tag
    if load.is_universal != (path / GLOBAL_STATE).is_file():
        return [
            f"{path / GLOBAL_STATE} is missing"
            if load.is_universal
            else f'{path} is a universal checkpoint (to load it, set "checkpoint": {{"load_universal": true}})'
        ]
    present = folders.own_files(path)
    counted: list[str] = []
    if manifest is not None:
        header, sizes = manifest.header, {name: entry.num_bytes for name, entry in manifest.files.items()}
    else:
        header, counted = ({}, []) if load.is_universal else folders.read_layout(path)
        are_here = not engine.use_node_local_storage()  # else those of other hosts are not
        sizes = dict.fromkeys(counted if are_here else (), 0) | present
    own = ""  # this rank's file of the optimizer, where one is to be loaded
    if not load.is_universal:
        if load.with_optimizer and (manifest is not None or any(map(_is_of_optimizer, counted))):
            own = Path(engine._get_zero_ckpt_name(str(load.folder), tag)).name
        if other := other_run(engine, header, bool(own)):
            return [other]
        latest = load.folder / folders.LATEST
        if load.reads_latest and tag != (newest := folders.read_latest(latest)):
            return [f"tag {tag} where {latest} names {newest}: stage 3 without optimizer states reads the latter"]
    if load.skips_optimizer:
        sizes = {name: size for name, size in sizes.items() if not _is_of_optimizer(name)}
    found = _damaged(path, sizes, manifest, readers)
    if manifest is not None:  # DeepSpeed takes any file of such a name
        found += [f"{path / name} is not in {MANIFEST}" for name in sorted(present - manifest.files.keys())]
    if load.is_universal:
        found += misfits(engine, path, load.with_optimizer)
        if load.reads_latest and (newest := folders.read_latest(load.folder / folders.LATEST)):
            _refuse_pattern(other_save := load.folder / newest)
            found += _damaged(other_save, folders.own_files(other_save), None, readers)
    elif manifest is None:
        found += missing_layers(engine, path)
    if own and own not in sizes:  # with disks of their own, ranks may have moved to other hosts
        found.append(f"{path / own} of rank {dist.get_rank()} is not in {path / MANIFEST if manifest else path}")
    elif own and not found and (other := other_parameters(engine, load.folder, tag)):
        found.append(other)
    return [*found] if found else _wrong_state(load, tag)


def _is_of_optimizer(name: str) -> bool:
    return name.endswith("optim_states.pt")


def _damaged(path: Path, sizes: Mapping[str, int], manifest: Manifest | None, readers: list[int]) -> list[str]:
    """List what is wrong with the files that this rank reads; each has one reader, and none reads much more."""
    found = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name))[readers.index(dist.get_rank()) :: len(readers)]:
        if problem := folders.damage(path, name, None if manifest is None else manifest.files[name]):
            found.append(problem)
            continue
        try:
            read_structure(path / name)
        except CheckpointError as error:
            found.append(str(error))
    return found


def _wrong_state(load: Load, tag: str) -> list[str | ConfigError]:
    """List what is wrong with our state in the model files that this rank may load."""
    engine, place, callbacks = load.engine, (str(load.folder), tag), load.engine._fp8_step_callbacks
    if (context := engine.fp8 or engine._fp8_unused) is None:
        return []
    found: list[str | ConfigError] = []
    for path in map(Path, engine._get_all_ckpt_names(*place) if load.is_universal else [engine._get_ckpt_name(*place)]):
        content = read_data(path, is_mapped=True) if path.is_file() else None
        if not isinstance(content, Mapping) or (state := content.get(CHECKPOINT_KEY)) is None:
            continue
        try:
            wrong = wrong_entries(context, state, load.load_module_only, load.with_optimizer, load.is_universal)
        except ConfigError as error:
            return [error]
        if not (wrong or load.load_module_only or callbacks is None):
            problem = callbacks.wrong_state(state.get(CALLBACKS_KEY))
            at = f"{CHECKPOINT_KEY}[{CALLBACKS_KEY!r}]"
            wrong = [f"{at}: expected what a save writes, got {problem}"] if problem else []
        found += [f"{path}: {text}" for text in wrong]
    return found


def other_run(engine: Any, header: Mapping[str, Any], with_optimizer: bool) -> str:
    """Describe how the layout of the run that wrote `header` differs from this one's; empty if the load works."""
    now, where = layout(engine), "at any world size"
    stage, of_parts, keys = now["zero_stage"], header["mp_world_size"] > 1, ["mp_world_size"]
    if not of_parts and now["mp_world_size"] > 1 and contexts_of(engine.module):
        return (
            f"{differs(header, now, keys)} (a checkpoint of a whole model does not say how "
            "fp8_ds.tp.parallelize shards it: `fp8-ds convert FOLDER OUT --to safetensors` gives its weights, which "
            "the model loads before it is sharded; docs/checkpoints.md)"
        )
    if (header["zero_stage"] == 3) != (stage == 3):
        keys, where = ["zero_stage"], "in another stage"
        if of_parts:  # which are joined in their own stage alone
            own = header["zero_stage"]
            return (
                f"{differs(header, now, keys)}, of several tensor-parallel ranks (in stage {own}, without tensor "
                f"parallelism, a universal checkpoint of it loads: {_remedy(own)}. What that engine saves goes to "
                "another stage)"
            )
    elif with_optimizer or (stage == 3 and now["dp_world_size"] > header["dp_world_size"]):
        keys.insert(0, "dp_world_size")
    other = differs(header, now, keys)
    return other and f"{other} (a universal checkpoint loads {where}: {_remedy(stage)})"


def differs(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return `key 1 in the checkpoint, 2 now` for the first of `keys` that differ; empty if none does."""
    odd = [key for key in keys if before.get(key) != now.get(key)]
    more = f" and {len(odd) - _NUM_SHOWN} more" if len(odd) > _NUM_SHOWN else ""
    values = [(key, before.get(key, "missing"), now.get(key, "missing")) for key in odd[:_NUM_SHOWN]]
    return ", ".join(f"{key} {old} in the checkpoint, {new} now" for key, old, new in values) + more


def _remedy(stage: int) -> str:
    """Return a remedy. `load_checkpoint` looks for a universal checkpoint in the folder that it is given."""
    return (
        f"`fp8-ds convert FOLDER FOLDER/universal --to universal --stage {stage}`, then "
        '"checkpoint": {"load_universal": true} and the same FOLDER; docs/checkpoints.md'
    )


def other_parameters(engine: Any, folder: Path, tag: str) -> str:
    """Describe how the parameters in this rank's model file differ from the engine's; empty if they do not."""
    path, ours = Path(engine._get_ckpt_name(str(folder), tag)), engine._get_zero_param_shapes()
    if (theirs := read_structure(path).get("param_shapes")) is None:
        return ""
    # Order counts: shards are parts of one flat tensor.
    before, now = ([list(_by_name([group]).items()) for group in groups] for groups in (theirs, ours))
    if before == now:
        return ""
    other = _differing(path, _by_name(theirs), _by_name(ours))
    return other or f"{path} has the model's parameters in another order or in other groups"


def _by_name(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    return {name: list(shape) for group in groups for name, shape in group.items()}


def _differing(path: Path, before: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> str:
    """Describe which shapes differ, by name; empty if none does."""
    other = differs(before, now, {**before, **now})
    return other and f"{path} is of another model: {other}"


def missing_layers(engine: Any, path: Path) -> list[str]:
    """Name the files of this rank's pipeline layers that are not in `path`; DeepSpeed looks for them by pattern."""
    if not isinstance(module := engine.module, PipelineModule):
        return []
    layers = [i for i, layer in enumerate(module.forward_funcs) if hasattr(layer, "load_state_dict")]
    return [f"{module.ckpt_layer_path(path, i)} is missing" for i in layers if not module.ckpt_layer_path_list(path, i)]


def misfits(engine: Any, path: Path, with_optimizer: bool) -> list[str]:
    """List what a universal checkpoint lacks for this rank, or has in other shapes than its own."""
    if not (model_files := engine._get_all_ckpt_names(str(path.parent), path.name)):
        stage = int(engine.zero_optimization_stage())
        return [f"a model file of this ZeRO stage is missing in {path} ({_in_form_of(path, stage)}, if it is whole)"]
    is_whole = all(tp.size == 1 for tp in contexts_of(engine.module))
    # DeepSpeed would split all weights along dim 0, without an error where they are sharded along their input.
    if not is_whole and UNIVERSAL_CHECKPOINT_INFO not in read_structure(Path(model_files[0])):
        return [
            f"{path} of a whole model, which does not say how fp8_ds.tp.parallelize shards its weights (load it "
            "without, or start the TP-sharded model from the weights themselves)"
        ]
    if not engine.zero_optimization():
        return []
    # In stages 1 and 2 a parameter that has had no gradient has no moments.
    tensors = TENSORS if engine.zero_optimization_partition_weights() and with_optimizer else TENSORS[:1]
    names = [name for group in engine._get_zero_param_shapes() for name in group]
    wanted = [path / "zero" / name / tensor for name in names for tensor in tensors]
    if missing := [f"{file} is missing" for file in wanted if not file.is_file()]:
        return missing
    return [other] if (other := other_universal(engine, path, Path(model_files[0]))) else []


def other_universal(engine: Any, path: Path, model_file: Path) -> str:
    """Describe how the universal checkpoint in `path` differs from this rank's parameters in shapes, or is in the form
    of another stage; empty if it fits. DeepSpeed compares the number of elements in stages 1 and 2, and nothing in 3,
    where the rest of a parameter becomes the start of the next.

    `model_file` has the shapes of parameters that are flat in their own files.
    """
    stage = int(engine.zero_optimization_stage())
    listed = read_structure(model_file).get("param_shapes") if stage == 3 else None
    flat_shapes = _by_name(listed or ())
    parameters = dict(engine.module.named_parameters())
    before, now = {}, {}
    for name, shape in _by_name(engine._get_zero_param_shapes()).items():
        content = read_structure(path / "zero" / name / TENSORS[0])
        if isinstance(content, dict):
            before[name] = list(content[PARAM].shape)
            now[name] = _whole_shape(parameters[name], shape, content, 1 if stage == 3 else engine.mp_world_size)
        elif stage < 3:
            return f"{path} is in the form that stage 3 reads ({_in_form_of(path, stage)})"
        else:
            saved = flat_shapes.get(name, shape)
            before[name], now[name] = saved if prod(saved) == content.numel() else list(content.shape), shape
    return _differing(path, before, now)


def _in_form_of(path: Path, stage: int) -> str:
    """Return the command that brings the universal checkpoint in `path` into the form that `stage` reads."""
    return f"`fp8-ds convert {path} {path} --to universal --stage {stage}` makes it that of stage {stage}"


def _whole_shape(p: Any, shape: list[int], content: Mapping[str, Any], num_parts: int) -> list[int]:
    """Return the shape in a universal checkpoint from which DeepSpeed gives this rank `shape`, as it is or as a part.

    Source: deepspeed/checkpoint/universal_checkpoint.py, load_hp_checkpoint_state (0.19.8).
    """
    saved, dim = list(content[PARAM].shape), content.get(CAT_DIM, 0)
    autotp: Mapping[str, Any] = getattr(p, _AUTOTP_META, None) or {}
    if logical := autotp.get("logical_shape"):
        is_view = len(logical) != len(saved) and prod(logical) == prod(saved)  # of fused parts
        return saved if is_view else list(logical)
    if saved == shape or dim >= len(shape):
        return shape
    whole = [size * num_parts if i == dim else size for i, size in enumerate(shape)]
    if content.get(VOCAB_TENSOR):  # without the rows that only pad it
        whole[0] = min(whole[0], saved[0])
    return whole
