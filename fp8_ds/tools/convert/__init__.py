"""Conversion between training checkpoints, safetensors in Hugging Face's layout, and universal checkpoints.

Weights leave as bf16 of the masters, bitwise what `save_16bit_model` gives, or as the FP8 bytes of training, which
follow from the masters. One process, on the CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8_ds.checkpoint import folders, fp8_folder, model_folder, serving
from fp8_ds.checkpoint import verify as verification
from fp8_ds.checkpoint.folders import GLOBAL_STATE, TENSORS
from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.tools.convert import universal
from fp8_ds.tools.convert.save import MODEL_FILES, Save, layouts_in, run_ds_to_universal, tags_in
from fp8_ds.tools.convert.universal import read_file, tensor_in

Kind = Literal["deepspeed", "universal", "safetensors", "fp8"]

_UNIVERSAL_REMEDY = (
    'Convert to universal and load that with "checkpoint": {"load_universal": true}, or start by from_pretrained; then '
    "call save_checkpoint."
)


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
    if (folder / folders.LATEST).exists() or any(folder.glob("*_model_states.pt")) or tags_in(folder):
        return "deepspeed"
    if any(folder.glob("*.safetensors")):
        return "safetensors" if fp8_folder.format_of(folder) is None else "fp8"
    nested = ", ".join(sorted(str(path.parent) for path in folder.glob(f"*/{folders.LATEST}")))  # Trainer's output_dir
    raise ConfigError(
        f"source: expected a folder of save_checkpoint, a universal checkpoint or one of safetensors, got {folder}. "
        f"Name the folder that was given to save_checkpoint{f': {nested}' if nested else ''}."
    )


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
        named = source if kind == "fp8" and model is None else model
        num_tensors, num_bytes, note = _write_model(kind, source, out, target, named, tag, trust_pickle, form, verify)
    return {
        "source": kind,
        "target": target,
        "files": sorted(os.listdir(out)),
        "num_tensors": num_tensors,
        "num_bytes": num_bytes,
        "latest": None if latest is None else str(latest),
        "note": note,
    }


def _write_model(
    kind: Kind,
    source: Path,
    out: Path,
    target: Kind,
    model: Path | None,
    tag: str | None,
    trust_pickle: bool,
    form: str | None,
    verify: bool,
) -> tuple[int, int, str | None]:
    """Write safetensors into `out`, and return how many tensors, their bytes, and the note."""
    configurations = model_folder.configuration_files(model) if model is not None else []
    given, note = None, None
    if target == "fp8":
        export, tensors = _exported(source, model, tag, trust_pickle, form)
        if verify:
            verification.refuse_to_verify(export)
        given, note = export.quantization_config(), export.describe()
    elif kind == "fp8":
        tensors = ((name, read()) for name, read in _readers(kind, source, torch.bfloat16).items())
    elif kind == "universal":
        tensors = _of_universal(source, trust_pickle)
    else:
        tensors = Save(source, tag, trust_pickle).tensors()
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
    return num_tensors, num_bytes, note


def _exported(
    source: Path, model: Path | None, tag: str | None, trust_pickle: bool, form: str | None
) -> tuple[serving.Export, Iterator[tuple[str, Tensor]]]:
    """Return what becomes of a save for servers, and its tensors."""
    if model is None:
        raise ConfigError("--model: expected a folder with config.json for an FP8 folder, got none. Name it.")
    save = Save(source, tag, trust_pickle, has_own=True)
    first, *others = save.own
    export = serving.export_of(first, save.shapes, form, SavedNames.of_folder(model), save.layouts, others)
    return export, export.tensors(save.parts())


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
                run_ds_to_universal(source, tag, work, trust_pickle)
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
    state = read_file(min(source.glob(MODEL_FILES)), trust_pickle)
    if frozen := state.get("frozen_param_fragments"):
        raise UnsupportedError(
            f"convert: expected trainable weights only in a universal checkpoint, got frozen ones too "
            f"({next(iter(frozen))}), which ds_to_universal.py leaves out. Convert the DeepSpeed checkpoint instead."
        )
    for name, shape in layouts_in(source, trust_pickle)[0].items():
        content = read_file(source / "zero" / name / TENSORS[0], trust_pickle, "cpu")
        yield name, tensor_in(content).reshape(shape).to(torch.bfloat16)
