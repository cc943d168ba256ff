"""Conversion between training checkpoints, safetensors in Hugging Face's layout, and universal checkpoints.

Weights leave as bf16 of the masters, bitwise what `save_16bit_model` gives, or as the FP8 bytes of training, which
follow from the masters. One process, on
the CPU. DeepSpeed's converters execute pickles, and find files by patterns, for which they also take a folder's name
(`a[b]` for `ab`). So they are given a folder of links to files that hold only data.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.checkpoint import constants
from torch import Tensor

from fp8_ds.checkpoint import folders, fp8_folder, model_folder, serving
from fp8_ds.checkpoint import verify as verification
from fp8_ds.checkpoint.folders import GLOBAL_STATE, TENSORS
from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.checkpoint.state import CHECKPOINT_KEY, LEFT_OUT_KEY, master_of
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.tools.convert import universal
from fp8_ds.tools.convert.universal import read_file, refuse_damage, shapes_in, tensor_in

Kind = Literal["deepspeed", "universal", "safetensors", "fp8"]

_PATTERN_SIGNS = frozenset("*?[(){}+^$|\\")
"""Signs of globs and regular expressions, which DeepSpeed's converter makes of names."""
_UNIVERSAL_REMEDY = (
    'Convert to universal and load that with "checkpoint": {"load_universal": true}, or start by from_pretrained; then '
    "call save_checkpoint."
)
_WHOLE_REMEDY = "Load a universal checkpoint of it without tensor parallelism, and call engine.save_16bit_model there."
_MODEL_FILES, _LAYER_FILES = "*mp_rank_*_model_states.pt", "layer_*-model_states.pt"


def kind_of(folder: Path) -> Kind:
    """Return the kind of checkpoint in `folder`; "fp8" are safetensors with scales, as servers read them.

    Trainer's checkpoint-N, which also has safetensors, is DeepSpeed's.

    Raises:
        ConfigError: it holds none of these.
        UnsupportedError: safetensors that are quantised in another way.
        OSError: there is no such folder.
    """
    folders.restore_replaced(folder.resolve())  # a conversion in its place may have been killed
    os.listdir(folder)
    if (folder / GLOBAL_STATE).exists():
        return "universal"
    if (folder / folders.LATEST).exists() or any(folder.glob("*_model_states.pt")) or _tags(folder):
        return "deepspeed"
    if any(folder.glob("*.safetensors")):
        return "safetensors" if fp8_folder.format_of(folder) is None else "fp8"
    nested = ", ".join(sorted(str(path.parent) for path in folder.glob(f"*/{folders.LATEST}")))  # Trainer's output_dir
    raise ConfigError(
        f"source: expected a folder of save_checkpoint, a universal checkpoint or one of safetensors, got {folder}. "
        f"Name the folder that was given to save_checkpoint{f': {nested}' if nested else ''}."
    )


def _tags(folder: Path) -> list[str]:
    """Return the saves in `folder`, unfinished ones too; a universal checkpoint is none."""
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
    form: str | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Write the checkpoint in `source` into `out` as `target`.

    Args:
        source: a folder, see `kind_of`.
        out: a folder that is empty or not there; or `source`, a universal checkpoint that is brought into the form of
            `stage`. What is to be replaced stays until the new one is complete.
        target: "safetensors", "fp8" (of a DeepSpeed checkpoint) or "universal".
        tag: which of several saves of a DeepSpeed checkpoint; None: the latest.
        stage: ZeRO stage that is to load the universal checkpoint; None: the one that saved the DeepSpeed checkpoint.
        model: for safetensors: a folder whose config and tokenizer files are copied beside the weights. "fp8" needs it.
        trust_pickle: whether files may hold more than data; then code of whoever wrote them is executed.
        form: for "fp8": "fp8-block" or "compressed-tensors"; None: the one that keeps the bytes of training.
        verify: for "fp8": whether to load the result by transformers, as a whole on the CPU, and compare.

    Returns:
        What `--json` prints: kinds of `source` and `target`; `files`, names within `out`; `num_tensors` and `num_bytes`
        of safetensors, or of universal masters and moments in fp32; `latest`, the path of DeepSpeed's file beside a
        universal checkpoint with its name in it, or None; `note`, a line on what became of FP8 weights, or None.

    Raises:
        ConfigError: `source` is none of these, `out` is not empty, or an option is of another target.
        CheckpointError: `source` is a save that did not end, is damaged (its manifest says so), holds more than data,
            or has a pipe, a device or the like where a file belongs; or `verify` found a difference.
        UnsupportedError: there is no such conversion; it says what to do instead.
        OSError: a file cannot be read or written.
    """
    kind, latest, note = kind_of(source), None, None
    is_in_place = kind == target == "universal" and out.resolve() == source.resolve()
    if out.exists() and any(out.iterdir()) and not is_in_place:
        raise ConfigError(f"out: expected an empty folder, got {out} with files. Name another.")
    if target == "fp8" and kind != "deepspeed":
        raise UnsupportedError(
            f"convert: expected a folder of save_checkpoint, which says what training had in FP8, got {kind}. Convert "
            "the checkpoint that it was made of."
        )
    if target == "deepspeed" or kind == target == "safetensors":
        remedy = _UNIVERSAL_REMEDY if target == "deepspeed" else "They are safetensors already, in their dtype."
        raise UnsupportedError(f"convert: expected kinds that can be converted, got {kind} to {target}. {remedy}")
    for option, is_wrong, wanted in (
        ("--model", model is not None and target not in ("safetensors", "fp8"), "safetensors as the target"),
        ("--format", form is not None and target != "fp8", "fp8 as the target"),
        ("--verify", verify and target != "fp8", "fp8 as the target"),
        ("--stage", stage is not None and target != "universal", "universal as the target"),
        ("--tag", tag is not None and kind != "deepspeed", "a DeepSpeed checkpoint"),
        ("--trust-pickle", trust_pickle and kind in ("safetensors", "fp8"), "files of torch.save"),
    ):
        if is_wrong:
            raise ConfigError(f"{option}: expected it with {wanted} only, got {kind} to {target}. Leave it out.")
    if target == "universal":
        if kind != "deepspeed" and stage is None:
            raise ConfigError(f"--stage: expected the stage that is to load it, got none from {kind}. Name 1, 2 or 3.")
        num_tensors, num_bytes = _write_universal(kind, source, out.resolve(), tag, stage, trust_pickle)
        if kind != "universal":
            latest = out.resolve().parent / folders.LATEST_UNIVERSAL
            folders.write_text(latest, out.resolve().name)
    else:
        if kind == "fp8" and model is None:
            model = source
        configurations = model_folder.configuration_files(model) if model is not None else []
        export = None
        if target == "fp8":
            if model is None:
                raise ConfigError("--model: expected a folder with config.json for an FP8 folder, got none. Name it.")
            if form is not None and form not in serving.FORMATS:
                raise ConfigError(f"--format: expected one of {', '.join(serving.FORMATS)}, got {form!r}. Name one.")
            names = SavedNames.of_folder(model)
            save = _Save(source, tag, trust_pickle, has_own=True)
            export = serving.export_of(save.own, save.shapes, form, names)
            if verify:
                verification.refuse_to_verify(export)
            tensors = export.tensors(save.tensors(dtype=None))
            note = export.describe()
        elif kind == "fp8":
            tensors = ((name, read()) for name, read in _readers(kind, source, torch.bfloat16).items())
        else:
            is_universal = kind == "universal"
            tensors = (
                _of_universal(source, trust_pickle) if is_universal else _Save(source, tag, trust_pickle).tensors()
            )
        given = None if export is None else export.quantization_config()
        changed = {
            path: text
            for path in configurations
            if path.name == fp8_folder.CONFIG and (text := fp8_folder.with_quantization(path, given)) is not None
        }

        def write_beside() -> None:
            for path in configurations:
                if path in changed:
                    folders.write_text(out / path.name, changed[path])
                else:
                    shutil.copyfile(path, out / path.name)

        num_tensors, num_bytes = model_folder.write_tensors(tensors, out, write_beside)
        if verify:
            note = f"{note}; {verification.verify(out)}"
    return {
        "source": kind,
        "target": target,
        "files": sorted(os.listdir(out)),
        "num_tensors": num_tensors,
        "num_bytes": num_bytes,
        "latest": None if latest is None else str(latest),
        "note": note,
    }


def _write_universal(
    kind: Kind, source: Path, out: Path, tag: str | None, stage: int | None, trust_pickle: bool
) -> tuple[int, int]:
    """Write `out`, and return how many masters and moments it has, and their bytes."""
    if out.is_mount():
        raise ConfigError(f"out: expected a folder that a rename can name, got the mount {out}. Name one in it.")
    with universal.published(out) as work:
        if kind in ("safetensors", "fp8"):
            read = SavedNames.of_folder(source).loaded(_readers(kind, source, torch.float32))
            universal.write_weights(read, work, int(stage or 0), source)
        else:
            if kind == "deepspeed":
                _run_ds_to_universal(source, tag, work, trust_pickle)
            else:
                universal.check_universal(source, trust_pickle)
                shutil.copytree(source, work, dirs_exist_ok=True)  # links are followed
            if stage is not None:
                universal.rewrite(work, stage, trust_pickle, out if kind == "deepspeed" else source)
        paths = [path for path in (work / "zero").rglob("*.pt") if path.name in TENSORS]
        sizes = [tensor_in(read_file(path, trust_pickle)).nbytes for path in paths]
    return len(sizes), sum(sizes)


def _readers(kind: Kind, source: Path, dtype: torch.dtype) -> Mapping[str, Callable[[], Tensor]]:
    """Return functions that read the tensors of a model folder, by name; FP8 weights as values in `dtype`."""
    if kind == "safetensors":
        return model_folder.readers(source)
    stored = fp8_folder.format_of(source)
    assert stored is not None
    return fp8_folder.value_readers(source, stored, dtype)


def _of_universal(source: Path, trust_pickle: bool) -> Iterator[tuple[str, Tensor]]:
    universal.check_universal(source, trust_pickle)
    files = sorted(source.glob(_MODEL_FILES))
    if _num_parts(source) != 1:
        raise UnsupportedError(f"convert: expected one tensor-parallel rank, got {len(files)} files. {_WHOLE_REMEDY}")
    state = read_file(files[0], trust_pickle)
    if frozen := state.get("frozen_param_fragments"):
        raise UnsupportedError(
            f"convert: expected trainable weights only in a universal checkpoint, got frozen ones too "
            f"({next(iter(frozen))}), which ds_to_universal.py leaves out. Convert the DeepSpeed checkpoint instead."
        )
    for name, shape in shapes_in(state, files[0]).items():
        content = read_file(source / "zero" / name / TENSORS[0], trust_pickle, "cpu")
        yield name, tensor_in(content).reshape(shape).to(torch.bfloat16)


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
            model = content if path.match(_MODEL_FILES) else model
            folders.refuse_paths(found := set(_parameter_names(content)), path)
            names |= found
            (staged / path.name).symlink_to(path.absolute())
        try:
            yield staged, model, names
        except (AssertionError, FileNotFoundError, IndexError, KeyError, RuntimeError, ValueError) as error:
            if isinstance(error, Fp8DsError) or "inline_container" in str(error):  # the latter is a full disk
                raise
            said = str(error).rstrip(".").replace(str(staged), str(folder))
            raise CheckpointError(
                f"convert: expected the files of all ranks in {folder}, got some that DeepSpeed cannot join "
                f"({type(error).__name__}: {said}). Copy the checkpoint again, if a file is missing."
            ) from error


def _num_parts(folder: Path) -> int:
    """Count the tensor-parallel ranks and pipeline stages."""
    return len({path.name.split("mp_rank_")[1] for path in folder.glob(_MODEL_FILES)})


def _find_save(source: Path, tag: str | None) -> Path:
    if tag is None and any(source.glob("*_model_states.pt")):
        return source.resolve()
    if tag is None and (tag := folders.read_latest(source / folders.LATEST)) is None:
        raise CheckpointError(
            f"convert: expected a file {folders.LATEST!r} in {source}, which the end of a save writes, got none. "
            f"Name one of its saves by --tag: {', '.join(_tags(source))}."
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


class _Save:
    """A save of DeepSpeed's, with the names and values of its tensors, which are read on access.

    Args:
        source, tag, trust_pickle: as `convert` has them.
        has_own: whether to read our own state, too.

    Attributes:
        own: our own state, with scales of split masters on the CPU; empty without `has_own`.
        shapes: of the trainable parameters, by name.

    Raises:
        ConfigError, CheckpointError: as `_staged_save` does.
        UnsupportedError: its weights are not all there, or not those of one whole model; or it has no state of ours.
    """

    def __init__(self, source: Path, tag: str | None, trust_pickle: bool, has_own: bool = False) -> None:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with _staged_save(source, tag, trust_pickle) as (staged, model, _):
            _refuse_parts(staged, model)
            file = min(staged.glob(_MODEL_FILES))
            self.own = _own_state(model, file, trust_pickle) if has_own else {}
            self.shapes = shapes_in(model, file) if has_own else {}
            self._lazy = get_fp32_state_dict_from_zero_checkpoint(str(staged.parent), staged.name, lazy_mode=True)

    def tensors(self, dtype: torch.dtype | None = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, floating ones in `dtype`; None: as DeepSpeed joins them."""
        written: set[int] = set()
        for name, lazy in self._lazy.items():
            if id(lazy) not in written:  # of a tied weight one name is enough, as in save_pretrained
                written.add(id(lazy))
                tensor = lazy if isinstance(lazy, Tensor) else lazy.contiguous()
                # Buffers may be integers.
                yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _refuse_parts(staged: Path, model: Mapping[str, Any]) -> None:
    if any(staged.glob(_LAYER_FILES)):
        raise UnsupportedError(
            "convert: expected no pipeline stages, got a PipelineModule's, whose names are those of its stages. "
            "Convert it to universal, or export with your own names."
        )
    if _num_parts(staged) > 1:
        raise UnsupportedError(f"convert: expected one tensor-parallel rank, got several. {_WHOLE_REMEDY}")
    if left_out := model.get(CHECKPOINT_KEY, {}).get(LEFT_OUT_KEY):
        raise UnsupportedError(
            f"convert: expected a checkpoint of all weights, got one without {len(left_out)} frozen ones, "
            f"{left_out[0]} among them: it was saved with exclude_frozen_parameters, as transformers saves PEFT "
            "models. Use the adapter's own files (adapter_model.safetensors), which Trainer writes beside it."
        )


def _own_state(model: Mapping[str, Any], file: Path, trust_pickle: bool) -> Mapping[str, Any]:
    state: Mapping[str, Any] | None = model.get(CHECKPOINT_KEY)
    if not state:
        raise UnsupportedError(
            "convert: expected a checkpoint of an engine with FP8, which says what was in FP8, got one without. "
            "Convert to safetensors."
        )
    if not BY_NAME[master_of(state["config"])].is_split:
        return state
    mapped = read_file(file, trust_pickle, "cpu", is_mapped=True)[CHECKPOINT_KEY]["scale_inv"]
    return {**state, "scale_inv": {name: scale.clone() for name, scale in mapped.items()}}


def _run_ds_to_universal(source: Path, tag: str | None, out: Path, trust_pickle: bool) -> None:
    """Have DeepSpeed's converter write `out`. It also raises as `_staged_save` does.

    Raises:
        UnsupportedError: a name does not match itself as a pattern, so that masters and moments would be left out; or
            shards of tensor-parallel ranks would all be joined along dim 0 (not those of pipelines, which are whole).
    """
    from deepspeed.checkpoint import ds_to_universal

    with _staged_save(source, tag, trust_pickle) as (staged, model, names):
        layers = [path.name.split("-")[0] for path in staged.glob(_LAYER_FILES)]
        are_whole = _num_parts(staged) == 1 or (bool(layers) and len(set(layers)) == len(layers))
        if not are_whole and not model.get(constants.UNIVERSAL_CHECKPOINT_INFO):
            raise UnsupportedError(
                f"convert: expected {constants.UNIVERSAL_CHECKPOINT_INFO!r} in model files, by which parts of "
                "tensor-parallel ranks are joined, got none. Save it again with this fp8_ds, or with that entry in "
                "client_state."
            )
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
