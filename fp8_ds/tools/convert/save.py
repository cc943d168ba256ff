"""Saves of DeepSpeed's: checked, linked into a folder of files that hold only data, and joined by its own converters.

They execute pickles, and find files by patterns, for which they also take a folder's name (`a[b]` for `ab`). So they
are given a folder of links.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import constants
from torch import Tensor

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.folders import GLOBAL_STATE
from fp8_ds.checkpoint.parts import INFO, Layout, layouts_of, without_info
from fp8_ds.checkpoint.state import CHECKPOINT_KEY, LEFT_OUT_KEY
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError
from fp8_ds.tools.convert.universal import read_file, refuse_damage, shapes_in

_PATTERN_SIGNS = frozenset("*?[(){}+^$|\\")
"""Signs of globs and regular expressions, which DeepSpeed's converter makes of names."""
_OF_DEEPSPEED = (
    *(AssertionError, FileNotFoundError, IndexError, KeyError, RuntimeError, ValueError),
    StopIteration,  # a tensor-parallel rank has nothing of a weight
)
"""Errors that DeepSpeed's converters raise for files that they cannot join."""
_PART = re.compile(r"mp_rank_(\d+)")
MODEL_FILES, _LAYER_FILES = "*mp_rank_*_model_states.pt", "layer_*-model_states.pt"


def tags_in(folder: Path) -> list[str]:
    """Return the saves in `folder`, unfinished ones too; a universal checkpoint is none."""
    found = {path.parent for path in folder.glob("*/*_model_states.pt")}
    return sorted(path.name for path in found if not (path / GLOBAL_STATE).exists())


@contextmanager
def _staged_save(
    source: Path, tag: str | None, trust_pickle: bool
) -> Iterator[tuple[Path, Mapping[str, Any], set[str]]]:
    """Check the files of a save, and link them into a folder for DeepSpeed to read within the block.

    Yields:
        (that folder; content of a model file, tensors on the meta device; names that become folders).

    Raises:
        ConfigError: there is no such save.
        CheckpointError: it did not end, its files are not as they were written, hold more than data, or DeepSpeed
            cannot join them.
    """
    folder = _find_save(source, tag)
    files = sorted(folders.own_files(folder))  # a pipe or a device is no file
    complete = folders.describe_complete(folder.parent, folder.name)
    problems = [f"{folder} is of a save that did not end"] if folder.name.endswith(folders.INCOMPLETE) else []
    if not problems and (manifest := refuse_damage(folder, complete)) is not None:
        files = [name for name in files if name in manifest.files]
    elif not problems:
        with suppress(CheckpointError):  # it holds more than data, as is said below where that is not allowed
            counted = folders.read_layout(folder)[1]
            problems = [f"{folder / name} is missing" for name in counted if name not in files]
    if problems:
        raise CheckpointError(f"convert: expected a whole save, got: {'; '.join(problems[:3])}. {complete}")
    model: Mapping[str, Any] = {}
    names: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place, "save")
        staged.mkdir()
        for path in (folder / name for name in files):
            read = read_file(path, trust_pickle)
            content = read if isinstance(read, Mapping) else {}
            model = content if path.match(MODEL_FILES) else model
            folders.refuse_paths(found := set(_parameter_names(content)), path)
            names |= found
            (staged / path.name).symlink_to(path.absolute())
        try:
            yield staged, model, names
        except _OF_DEEPSPEED as error:
            if isinstance(error, Fp8DsError) or "inline_container" in str(error):  # the latter is a full disk
                raise
            said = re.sub(rf"{re.escape(place)}/\w+", lambda _: str(folder), str(error).rstrip("."))
            raise CheckpointError(
                f"convert: expected the files of all ranks in {folder}, got some that DeepSpeed cannot join "
                f"({type(error).__name__}: {said}). Copy the checkpoint again, if a file is missing."
            ) from error


def num_parts(folder: Path) -> int:
    """Count the tensor-parallel ranks and pipeline stages."""
    return len(_files_of_parts(folder))


def _files_of_parts(folder: Path) -> list[list[Path]]:
    """Return the files of each tensor-parallel rank, or pipeline stage, that has a model file, by its number."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _PART.search(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return [files for _, files in sorted(found.items()) if any(path.match(MODEL_FILES) for path in files)]


def layouts_in(folder: Path, trust_pickle: bool) -> tuple[dict[str, Any], dict[str, Layout]]:
    """Return the whole shapes of the trainable parameters, and how parts of tensor-parallel ranks are joined, by name.

    Args:
        folder: with model files; of one rank, and of such as `layouts_of` can join.
    """
    files = [_model_file(part) for part in _files_of_parts(folder)]
    models = [read_file(path, trust_pickle) for path in files]
    if len(models) > 1 and not models[0].get(INFO):
        raise without_info()
    shapes = [shapes_in(model, path) for model, path in zip(models, files, strict=True)]
    if len(models) == 1:
        return shapes[0], {}
    if odd := next((name for own in shapes for name in sorted(own.keys() ^ shapes[0].keys())), None):
        raise UnsupportedError(
            f"convert: expected the same parameters in the model files of all ranks, got {odd} in some. If they are "
            "stages of a pipeline, whose names are not the model's, export with your own names. If a tensor-parallel "
            "rank has nothing of it, as with fewer key-value heads than ranks, shard over fewer ranks."
        )
    if frozen := models[0].get(constants.FROZEN_PARAM_SHAPES):
        raise UnsupportedError(
            f"convert: expected trained weights only from tensor-parallel ranks, got frozen ones ({next(iter(frozen))})"
            ", of which nothing says how they are joined. Load a universal checkpoint of it into the whole model, and "
            "export that."
        )
    layouts = layouts_of(models[0].get(INFO), shapes)
    return {name: layout.shape for name, layout in layouts.items()}, layouts


def _find_save(source: Path, tag: str | None) -> Path:
    if tag is None and any(source.glob("*_model_states.pt")):
        return source.resolve()
    if tag is None and (tag := folders.read_latest(source / folders.LATEST)) is None:
        raise CheckpointError(
            f"convert: expected a file {folders.LATEST!r} in {source}, which the end of a save writes, got none. "
            f"Name one of its saves by --tag: {', '.join(tags_in(source))}."
        )
    folder = source / folders.folders_of(source, tag)[0]
    if not folder.is_dir():
        raise ConfigError(f"--tag: expected a folder in {source}, got {tag!r}. Name one that was saved.")
    return folder


def _parameter_names(content: Any) -> Iterator[str]:
    """Yield the names in a file of a save from which DeepSpeed's converter makes folders."""
    groups = [content.get("module")]
    for owner, key in (
        (content, constants.PARAM_SHAPES),
        (content.get(constants.OPTIMIZER_STATE_DICT), constants.PARAM_SLICE_MAPPINGS),
    ):
        listed = owner.get(key) if isinstance(owner, Mapping) else None
        groups += listed.values() if isinstance(listed, Mapping) else listed or ()  # by the number of a group
    for group in groups:
        yield from group if isinstance(group, Mapping) else ()


class Save:
    """A save of DeepSpeed's, with the names and values of its tensors, which are read on access.

    Args:
        source, tag, trust_pickle: as `convert` has them.
        has_own: whether to read our own state, too.

    Attributes:
        own: our own states, of each tensor-parallel rank, with scales of split masters on the CPU; empty without
            `has_own`.
        shapes: of the trainable parameters, by name; of whole ones.
        layouts: how the parts of tensor-parallel ranks are joined, by name; empty if there is one rank.

    Raises:
        ConfigError, CheckpointError: as `_staged_save` does.
        UnsupportedError: its weights are not all there, or not those of one whole model; or it has no state of ours.
    """

    def __init__(self, source: Path, tag: str | None, trust_pickle: bool, has_own: bool = False) -> None:
        with _staged_save(source, tag, trust_pickle) as (staged, model, _):
            _refuse_stages_and_left_out(staged, model)
            parts = _files_of_parts(staged)
            self.shapes, self.layouts = layouts_in(staged, trust_pickle)
            self.own = [_own_state(_model_file(part), trust_pickle) for part in parts] if has_own else []
            self._lazy = [_joined_by_zero(staged.parent / f"part_{i}", part) for i, part in enumerate(parts)]

    def parts(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the tensors as DeepSpeed joins them over data-parallel ranks: of one in parts those of all ranks."""
        written: set[int] = set()
        for name, lazy in self._lazy[0].items():
            if id(lazy) not in written:  # of a tied weight one name is enough, as in save_pretrained
                written.add(id(lazy))
                is_whole = name not in self.layouts or self.layouts[name].dim is None
                found = [own[name] for own in self._lazy[: 1 if is_whole else None]]
                yield name, [one if isinstance(one, Tensor) else one.contiguous() for one in found]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors, floating ones in bf16."""
        for name, parts in self.parts():
            tensor = self.layouts[name].join(parts) if name in self.layouts else parts[0]
            yield name, tensor.bfloat16() if tensor.is_floating_point() else tensor  # buffers may be integers


def _model_file(part: list[Path]) -> Path:
    return next(path for path in part if path.match(MODEL_FILES))


def _joined_by_zero(folder: Path, files: list[Path]) -> Mapping[str, Any]:
    """Return the tensors of a tensor-parallel rank, joined over its data-parallel ranks on access.

    Args:
        folder: to be made for links.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder.mkdir()
    for path in files:
        (folder / path.name).symlink_to(path.resolve())
    found: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name, lazy_mode=True)
    return found


def _refuse_stages_and_left_out(staged: Path, model: Mapping[str, Any]) -> None:
    if any(staged.glob(_LAYER_FILES)):
        raise UnsupportedError(
            "convert: expected no pipeline stages, got a PipelineModule's, whose names are those of its stages. "
            "Convert it to universal, or export with your own names."
        )
    if left_out := model.get(CHECKPOINT_KEY, {}).get(LEFT_OUT_KEY):
        raise UnsupportedError(
            f"convert: expected a checkpoint of all weights, got one without {len(left_out)} frozen ones, "
            f"{left_out[0]} among them: it was saved with exclude_frozen_parameters, as transformers saves PEFT "
            "models. Use the adapter's own files (adapter_model.safetensors), which Trainer writes beside it."
        )


def _own_state(file: Path, trust_pickle: bool) -> Mapping[str, Any]:
    state: Mapping[str, Any] | None = read_file(file, trust_pickle).get(CHECKPOINT_KEY)
    if not state:
        raise UnsupportedError(
            "convert: expected a checkpoint of an engine with FP8, which says what was in FP8, got one without. "
            "Convert to safetensors."
        )
    mapped = read_file(file, trust_pickle, "cpu", is_mapped=True)[CHECKPOINT_KEY]["scale_inv"]
    return {**state, "scale_inv": {name: scale.clone() for name, scale in mapped.items()}}


def run_ds_to_universal(source: Path, tag: str | None, out: Path, trust_pickle: bool) -> None:
    """Have DeepSpeed's converter write `out`. It also raises as `_staged_save` does.

    Raises:
        UnsupportedError: a name does not match itself as a pattern, so that masters and moments would be left out; or
            shards of tensor-parallel ranks would all be joined along dim 0 (not those of pipelines, which are whole).
    """
    from deepspeed.checkpoint import ds_to_universal

    with _staged_save(source, tag, trust_pickle) as (staged, model, names):
        layers = [path.name.split("-")[0] for path in staged.glob(_LAYER_FILES)]
        are_whole = num_parts(staged) == 1 or (bool(layers) and len(set(layers)) == len(layers))
        if not are_whole and not model.get(INFO):
            raise without_info()
        if odd := sorted(name for name in names if set(name) & _PATTERN_SIGNS):
            raise UnsupportedError(
                "convert: expected names of parameters that DeepSpeed's converter finds again, without any of "
                f"{' '.join(sorted(_PATTERN_SIGNS))}, got {odd[0]!r}. Load it at its own stage and world size."
            )
        target = staged.parent / "universal"  # it takes the name of this folder for a pattern, too
        target.symlink_to(out.absolute())
        options: dict[str, Any] = {"input_folder": str(staged), "output_folder": str(target)}
        options |= {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(argparse.Namespace(**options, inject_missing_state=True))
