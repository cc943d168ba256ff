"""Between checkpoints of training, bf16 safetensors in Hugging Face's layout, and universal checkpoints.

Weights leave as bf16 of the masters, bitwise what `save_16bit_model` gives; nothing passes through FP8. One process, on
the CPU. DeepSpeed's files are pickles, and its converters execute them: so all are read without executing anything
first, and what holds more than data is refused. They find files by patterns: so they are given a folder of those alone.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.adopt import GLOBAL_STATE, adopt
from fp8_ds.checkpoint.contents import deepspeed_classes, read_data, read_structure, unknown_names
from fp8_ds.checkpoint.from_safetensors import refuse_without_safetensors, write_universal
from fp8_ds.checkpoint.manifest import beside
from fp8_ds.checkpoint.to_safetensors import model_files, write_safetensors
from fp8_ds.checkpoint.universal import TENSORS, refuse_damage, rewrite_universal
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError

Kind = Literal["deepspeed", "universal", "safetensors"]

_NUM_SHOWN = 3
_CONFIG = "config.json"
_PATTERN_SIGNS = frozenset("*?[(){}+^$|\\")
"""Signs of globs and regular expressions, which DeepSpeed's converter makes of names."""


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        source, target: kinds.
        files: names within the output folder.
        num_tensors, num_bytes: of safetensors; of a universal checkpoint masters and moments, in fp32.
        latest: DeepSpeed's file beside a universal checkpoint, with its name in it; None where none was written.
    """

    source: Kind
    target: Kind
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    latest: str | None = None


def kind_of(folder: Path) -> Kind:
    """What `folder` holds. Trainer's checkpoint-N holds safetensors too: it is a checkpoint of DeepSpeed's.

    Raises:
        ConfigError: none of these.
        FileNotFoundError: there is no such folder.
        NotADirectoryError: it is a file.
    """
    if folder.is_file():
        raise NotADirectoryError(20, "A file, not the folder that it is in", str(folder))
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such folder", str(folder))
    if (folder / GLOBAL_STATE).exists():
        return "universal"
    if (folder / folders.LATEST).exists() or any(folder.glob("*_model_states.pt")) or _tags(folder):
        return "deepspeed"
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    raise ConfigError(
        f"source: expected a folder of save_checkpoint, a universal checkpoint or one of safetensors, got {folder}. "
        f"Name the folder that was given to save_checkpoint{_nested(folder)}."
    )


def _nested(folder: Path) -> str:
    """Those in `folder`, as in Trainer's output_dir, for an error."""
    found = sorted(path.parent for path in folder.glob(f"*/{folders.LATEST}"))
    return f": {', '.join(map(str, found))}" if found else ""


def _tags(folder: Path) -> list[str]:
    """Folders of saves in `folder`, such as are not finished too; a universal checkpoint in it is none."""
    found = {path.parent for path in folder.glob("*/*_model_states.pt")}
    return sorted(path.name for path in found if not (path / GLOBAL_STATE).exists())


def convert(
    source: Path,
    out: Path,
    target: Kind,
    tag: str | None = None,
    stage: int | None = None,
    model: Path | None = None,
    trust_pickle: bool = False,
) -> Converted:
    """`out` holds the checkpoint in `source` as `target` afterwards.

    Args:
        source: see `kind_of`.
        out: a folder that is empty or not there.
        target: "safetensors" or "universal".
        tag: which of several saves of a DeepSpeed checkpoint; None: the latest.
        stage: of ZeRO, that is to load the universal checkpoint; None: the one that saved the DeepSpeed checkpoint.
        model: for safetensors: a folder whose config and tokenizer files are copied beside the weights.
        trust_pickle: files may hold more than data; then code of whoever wrote them is executed.

    Raises:
        ConfigError: `source` is none of these, `out` is not empty, an option is of another target, or the package
            safetensors is needed and cannot be imported.
        CheckpointError: `source` is a save that did not end, is damaged (its manifest says so), holds more than data,
            or has a pipe, a device or the like where a file belongs.
        UnsupportedError: there is no such conversion; it says what to do instead.
        OSError: a file cannot be read or written.
    """
    kind = kind_of(source)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out: expected an empty folder, got {out} with files. Name another.")
    if target == "universal" and model is not None:
        raise ConfigError("--model: expected it with safetensors only, got universal. Leave it out.")
    if model is not None and not (model / _CONFIG).is_file():  # said before the weights are written, not after
        raise ConfigError(f"--model: expected a folder with {_CONFIG}, got {model}. Name the model's folder.")
    if model is not None:
        manifests.refuse_special(model_files(model))
    if target == "safetensors" and stage is not None:
        raise ConfigError("--stage: expected it with universal only, got safetensors. Leave it out.")
    if tag is not None and kind != "deepspeed":
        raise ConfigError(f"--tag: expected it with a DeepSpeed checkpoint only, got {kind}. Leave it out.")
    if trust_pickle and kind == "safetensors":
        raise ConfigError("--trust-pickle: expected it with files of torch.save, got safetensors. Leave it out.")
    refusal = _REFUSED.get((kind, target))
    if refusal is not None:
        raise UnsupportedError(f"convert: expected kinds that can be converted, got {kind} to {target}. {refusal}")
    if "safetensors" in (kind, target):  # said before a file is read, not after
        refuse_without_safetensors()
    if target == "universal":
        return _to_universal(kind, source, out, tag, stage, trust_pickle)
    tensors = _of_universal(source, trust_pickle) if kind == "universal" else _of_deepspeed(source, tag, trust_pickle)
    files, num_tensors, num_bytes = write_safetensors(tensors, out, model)
    return Converted(kind, "safetensors", tuple(files), num_tensors, num_bytes)


_REFUSED: Mapping[tuple[str, str], str] = {
    ("safetensors", "safetensors"): "They are safetensors already, in the dtype that they were saved in.",
    ("safetensors", "deepspeed"): (
        'Convert them to universal, which an engine loads with "checkpoint": {"load_universal": true}, or start from '
        "them: from_pretrained, then deepspeed.initialize. Then call save_checkpoint."
    ),
    ("deepspeed", "deepspeed"): "To change ranks or stage, convert it to universal.",
    ("universal", "deepspeed"): (
        'Load it instead, with "checkpoint": {"load_universal": true} in the configuration, and call save_checkpoint.'
    ),
}
"""(source, target) and what to do instead."""


# --- reading ---


def _of_deepspeed(source: Path, tag: str | None, trust_pickle: bool) -> Iterator[tuple[str, Tensor]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    save = _save_of(source, tag)
    with _staged(save, trust_pickle) as staged:
        if any(staged.glob("layer_*-model_states.pt")):
            raise UnsupportedError(
                "convert: expected a checkpoint without pipeline stages, got one of a PipelineModule, whose names are "
                "those of its stages. Convert it to universal, or export with your own names."
            )
        # In stage 3 each data-parallel rank has a file, of zero_pp_rank_0_mp_rank_01 and the like.
        if len({path.name.split("mp_rank_")[1] for path in staged.glob("*mp_rank_*_model_states.pt")}) > 1:
            raise UnsupportedError(
                "convert: expected one tensor-parallel rank, got several, whose weights are cut. Convert it to "
                "universal, load that without tensor parallelism, and call engine.save_16bit_model there."
            )
        _refuse_without_frozen(staged)
        with _as_incomplete(save, staged):
            state = get_fp32_state_dict_from_zero_checkpoint(str(staged.parent), staged.name, lazy_mode=True)
    made: dict[int, str] = {}
    for name, lazy in state.items():
        if id(lazy) in made:  # a tied weight: its other name is enough, as in save_pretrained
            continue
        made[id(lazy)] = name
        tensor = lazy if isinstance(lazy, Tensor) else lazy.contiguous()
        yield name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor  # buffers may be integers


def _own_state(folder: Path) -> Mapping[str, Any]:
    """What fp8_ds has written into a model file of `folder` that holds data only; empty if nothing."""
    from fp8_ds.checkpoint.state import CHECKPOINT_KEY

    for path in sorted(folder.glob("*mp_rank_*_model_states.pt")):
        with contextlib.suppress(CheckpointError):
            if state := read_structure(path, deepspeed_classes()).get(CHECKPOINT_KEY):
                return dict(state)
    return {}


def _refuse_without_frozen(folder: Path) -> None:
    from fp8_ds.checkpoint.state import LEFT_OUT_KEY

    if names := _own_state(folder).get(LEFT_OUT_KEY):
        raise UnsupportedError(
            f"convert: expected a checkpoint of all weights, got one without {len(names)} frozen ones, {names[0]} "
            "among them: it was saved with exclude_frozen_parameters, as transformers saves PEFT models. Use the "
            "adapter's own files (adapter_model.safetensors), which Trainer writes beside it."
        )


def _save_of(source: Path, tag: str | None) -> Path:
    """The folder of one save; `source` may be that, or the folder of all.

    Raises:
        ConfigError: there is no such save.
        CheckpointError: it did not end, or its files are not as they were written.
    """
    if any(source.glob("*_model_states.pt")) and tag is None:
        folder, tag = source.resolve().parent, source.resolve().name
    else:
        if tag is None and not (source / folders.LATEST).exists():
            raise CheckpointError(
                f"convert: expected a file {folders.LATEST!r} in {source}, which the end of a save writes, got none. "
                f"Name one of its saves by --tag: {', '.join(_tags(source))}."
            )
        if tag is None:
            manifests.refuse_special([source / folders.LATEST])
            tag = (source / folders.LATEST).read_text().strip()
            manifests.refuse_paths([tag], source / folders.LATEST)
        folder, tag = source, folders.find(source, tag)
    if not (folder / tag).is_dir():
        raise ConfigError(f"--tag: expected a folder in {source}, got {tag!r}. Name one that was saved.")
    manifests.refuse_special((folder / tag).glob("*_states.pt"))
    if tag.endswith(folders.INCOMPLETE):
        problems = [f"{folder / tag} is of a save that did not end"]
    else:
        manifest = manifests.read_manifest(folder / tag)
        files = {} if manifest is None else manifest.files
        problems = [text for name, entry in files.items() if (text := manifests.damage(folder / tag, name, entry))]
        if manifest is None and _own_state(folder / tag):
            problems = [manifests.lacks_manifest(folder / tag)]
    if problems:
        raise CheckpointError(
            f"convert: expected a whole checkpoint, got: {'; '.join(problems[:_NUM_SHOWN])}. "
            f"{folders.describe_complete(folder, tag)}"
        )
    return folder / tag


@contextlib.contextmanager
def _staged(save: Path, trust_pickle: bool) -> Iterator[Path]:
    """A folder of links to the files of `save` that have been checked: those of its manifest, or all, if it has none.

    DeepSpeed's converters open whatever has a name that begins or matches so, in folders within as well, and take the
    names of folders for patterns: `a[b]` for `ab`.

    Raises:
        CheckpointError: a file holds more than data.
    """
    manifest = manifests.read_manifest(save)
    files = [path for path in sorted(save.glob("*_states.pt")) if manifest is None or path.name in manifest.files]
    if not trust_pickle:
        _refuse_code(files)
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place, "save")
        staged.mkdir()
        for path in files:
            (staged / path.name).symlink_to(path.absolute())
        yield staged


@contextlib.contextmanager
def _as_incomplete(save: Path, staged: Path) -> Iterator[None]:
    """What DeepSpeed's readers raise of a save without a manifest, which would tell what is missing, is an error of
    that save, and so is a file that they do not find. What torch raises of a full disk stays what it is.

    Args:
        staged: the folder that they read, of links to files of `save`.
    """
    try:
        yield
    except (AssertionError, FileNotFoundError, IndexError, KeyError, RuntimeError, ValueError) as error:
        is_known = manifests.read_manifest(save) is not None and not isinstance(error, FileNotFoundError)
        if is_known or "inline_container" in str(error):
            raise
        said = str(error).rstrip(".").replace(str(staged), str(save))
        raise CheckpointError(
            f"convert: expected the files of all ranks in {save}, got some that DeepSpeed cannot join "
            f"({type(error).__name__}: {said}). Copy the checkpoint again."
        ) from error


def _refuse_code(files: Iterable[Path]) -> None:
    """Every one of these files of torch.save holds data only.

    Raises:
        CheckpointError: a file does not, or cannot be read so.
    """
    for path in files:
        try:
            if names := unknown_names(path, deepspeed_classes()):
                raise CheckpointError(f"{path}: expected tensors and plain data, got {', '.join(names)}.")
            read_structure(path, deepspeed_classes())
        except CheckpointError as error:
            raise CheckpointError(
                f"convert: {error} If you trust whoever wrote it, add --trust-pickle, which executes what it names."
            ) from error


def _load(path: Path, trust_pickle: bool, device: str = "cpu") -> Any:
    if trust_pickle:
        return torch.load(path, map_location=device, weights_only=False)
    return read_data(path, deepspeed_classes(), device)


def _of_universal(source: Path, trust_pickle: bool) -> Iterator[tuple[str, Tensor]]:
    refuse_damage(source)
    files = sorted(source.glob("*mp_rank_*_model_states.pt"))
    if not files or len({file.name.split("mp_rank_")[-1] for file in files}) > 1:
        raise UnsupportedError(
            f"convert: expected model files of one tensor-parallel rank in {source}, got {len(files)}. Load it without "
            "tensor parallelism, and call engine.save_16bit_model there."
        )
    names = sorted(manifests.files_in(source, ".pt"))
    if not trust_pickle:
        _refuse_code(source / name for name in names)
    state = _load(files[0], trust_pickle)
    frozen = state.get("frozen_param_fragments") or {}
    if frozen:
        raise UnsupportedError(
            f"convert: expected trainable weights only in a universal checkpoint, got frozen ones too "
            f"({next(iter(frozen))}), which ds_to_universal.py leaves out. Convert the DeepSpeed checkpoint instead."
        )
    for group in state["param_shapes"]:
        manifests.refuse_paths(group, files[0])
        for name, shape in group.items():
            content = _load(source / "zero" / name / "fp32.pt", trust_pickle)
            master = content["param"] if isinstance(content, dict) else content
            yield name, master.reshape(shape).to(torch.bfloat16)


# --- to a universal checkpoint ---


def _to_universal(
    kind: Kind, source: Path, out: Path, tag: str | None, stage: int | None, trust_pickle: bool
) -> Converted:
    if kind != "deepspeed" and stage is None:
        why = "It is universal already." if kind == "universal" else "Safetensors are of no stage: name 1, 2 or 3."
        raise ConfigError(f"--stage: expected the stage that is to load it, got none. {why}")
    out = out.resolve()
    if out.is_mount():
        raise ConfigError(
            f"out: expected a folder that takes its name by a rename, got the mount {out}. Name one in it."
        )
    work = beside(out, folders.INCOMPLETE)
    staging = work / out.name
    shutil.rmtree(work, ignore_errors=True)  # of a conversion that was killed
    try:
        with folders.as_file_errors(out, work):
            if kind == "universal":
                refuse_damage(source)
                names = sorted(manifests.files_in(source, ""))
                if not trust_pickle:
                    _refuse_code(source / name for name in names if name.endswith(".pt"))
                shutil.copytree(source, staging)
            elif kind == "safetensors":
                assert stage is not None
                write_universal(source, staging, stage)
            else:
                _run_stock(source, tag, staging, trust_pickle)
            if stage is not None:
                rewrite_universal(staging, out, stage, trust_pickle)
            adopt(staging, trust_pickle)
            sizes = _sizes(staging, trust_pickle)
        staging.rename(out)
        manifests.sync_folder(out.parent)
        latest = None if kind == "universal" else out.parent / folders.LATEST_UNIVERSAL
        if latest is not None:
            manifests.write_text(latest, out.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    files = tuple(sorted(path.name for path in out.iterdir()))
    return Converted(kind, "universal", files, len(sizes), sum(sizes), None if latest is None else str(latest))


def _sizes(folder: Path, trust_pickle: bool) -> list[int]:
    """Bytes of each master and moment of a universal checkpoint."""
    sizes = []
    for path in (folder / "zero").rglob("*.pt"):
        if path.name in TENSORS:
            content = _load(path, trust_pickle, "meta")
            sizes.append((content["param"] if isinstance(content, dict) else content).nbytes)
    return sizes


def _refuse_unknown_cuts(folder: Path) -> None:
    """Stock code joins parts that it knows nothing of along dim 0, and whole parameters likewise."""
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

    files = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(folder.glob("*_mp_rank_*_model_states.pt"))
    if len({file.name.split("mp_rank_")[-1] for file in files}) < 2 or _has_whole_layers(folder):
        return
    with contextlib.suppress(CheckpointError):  # more than data, which --trust-pickle has allowed
        if not read_structure(files[0], deepspeed_classes()).get(UNIVERSAL_CHECKPOINT_INFO):
            raise UnsupportedError(
                f"convert: expected {UNIVERSAL_CHECKPOINT_INFO!r} in {files[0].name}, by which tensor-parallel ranks' "
                "parts are joined, got none. Save it again with this fp8_ds, or with that entry in client_state."
            )


def _has_whole_layers(folder: Path) -> bool:
    """Whether `folder` is of a pipeline whose model ranks are stages alone: each layer is in one file, not in parts."""
    files = list(folder.glob("layer_*-model_states.pt"))
    return bool(files) and len({file.name.split("-")[0] for file in files}) == len(files)


def _refuse_names(save: Path, staged: Path, trust_pickle: bool) -> None:
    """DeepSpeed's converter makes a folder of each parameter's name, and looks in it by a pattern of that name.

    Raises:
        CheckpointError: a name leads elsewhere.
        UnsupportedError: a name is no pattern of itself: masters and moments would be left out.
    """
    for path in sorted(staged.iterdir()):
        names = list(_parameter_names(_load(path, trust_pickle, "meta")))
        manifests.refuse_paths(names, save / path.name)
        if odd := next((name for name in names if set(name) & _PATTERN_SIGNS), None):
            raise UnsupportedError(
                "convert: expected names of parameters that DeepSpeed's converter finds again, without any of "
                f"{' '.join(sorted(_PATTERN_SIGNS))}, got {odd!r}. Load the checkpoint at its own stage and world size."
            )


def _parameter_names(content: Any) -> Iterator[Any]:
    """Names in a file of a save of which DeepSpeed's converter makes folders."""
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES, PARAM_SLICE_MAPPINGS

    if not isinstance(content, Mapping):
        return
    optimizer = content.get(OPTIMIZER_STATE_DICT)
    groups = [content.get("module")]
    for owner, key in ((content, PARAM_SHAPES), (optimizer, PARAM_SLICE_MAPPINGS)):
        listed = owner.get(key) if isinstance(owner, Mapping) else None
        groups += listed.values() if isinstance(listed, Mapping) else listed or ()  # by the number of a group
    for group in groups:
        yield from group if isinstance(group, Mapping) else ()


def _run_stock(source: Path, tag: str | None, out: Path, trust_pickle: bool) -> None:
    """DeepSpeed's converter has written `out`."""
    from deepspeed.checkpoint import ds_to_universal

    save = _save_of(source, tag)
    with _staged(save, trust_pickle) as staged:
        _refuse_unknown_cuts(staged)
        _refuse_names(save, staged, trust_pickle)
        out.mkdir(parents=True, exist_ok=True)
        target = staged.parent / "universal"  # it takes the name of this folder for a pattern, too
        target.symlink_to(out.absolute())
        options: dict[str, Any] = {"input_folder": str(staged), "output_folder": str(target)}
        options |= {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        with _as_incomplete(save, staged):
            ds_to_universal.main(argparse.Namespace(**options, inject_missing_state=True))
