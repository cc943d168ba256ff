"""FP8 tensors of an engine under the names of a model folder: one after the other for a server that has the model, or
saved as a folder that servers load. Both are collective, and have the bytes of `fp8-ds convert --to fp8`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as ds_comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.fp8_folder import CONFIG, with_quantization
from fp8_ds.checkpoint.model_folder import configuration_files, write_tensors
from fp8_ds.checkpoint.saved_names import SavedNames, transformers_class
from fp8_ds.checkpoint.serving import Export, export_of
from fp8_ds.checkpoint.state import save_state
from fp8_ds.engine.parts import TensorParallelParts
from fp8_ds.engine.ranks import say, tell_all
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError

_WIDTH = 300


@dataclass(frozen=True)
class EngineExport:
    """How the model of an engine leaves: `export`, and what gathers parts of tensor-parallel ranks for it."""

    export: Export
    parts: TensorParallelParts


def export_of_engine(engine: Any, form: str | None, what: str) -> EngineExport:
    """Return how the model of `engine` leaves in the form `form` for `what`, a function that is named in errors.

    Collective where tensor parallelism shards the model.

    Raises:
        UnsupportedError: nothing is in FP8, or the model holds what is not written yet.
    """
    if engine.fp8 is None:
        raise UnsupportedError(f"{what}: expected linears in FP8, got none. Save the model as without fp8_ds.")
    if isinstance(engine, PipelineEngine):
        raise UnsupportedError(
            f"{what}: expected a whole model, got stages of a pipeline, whose names are not the model's. Use "
            "engine.save_checkpoint and `fp8-ds convert --to universal`, and load that without a pipeline."
        )
    if hasattr(engine.module, "peft_config") or getattr(engine.module, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"{what}: expected a model without adapters, got one of peft. Save the adapters by their own "
            "save_pretrained, merge them into the model (merge_and_unload), and export that."
        )
    parts = TensorParallelParts(engine, what)
    names = SavedNames.of_module(engine.module)
    if names.model is None:
        say(f"fp8: {what}: names of tensors are those of the model, for the engine has {names.reason}")
    state = save_state(engine.fp8)
    return EngineExport(export_of(state, parts.shapes, form, names, parts.layouts, parts.other_ranks), parts)


def tensors_of(engine: Any, made: EngineExport) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an export on the engine's device, one parameter gathered at a time; each tensor once."""
    export, parts = made.export, made.parts
    for name, tensor in _named_tensors(engine.module):
        if not isinstance(tensor, nn.Parameter):
            yield from export.saved(name, [tensor])
        elif hasattr(tensor, "_fp8") and name in export.layers and export.is_own(name):
            yield from _stored(engine, made, name, tensor)
        elif hasattr(tensor, "_fp8"):
            yield from export.saved(name, parts.gather(name, _master(tensor)))
        else:
            with _full_value(tensor) as value:
                yield from export.saved(name, parts.gather(name, value))


def _stored(engine: Any, made: EngineExport, name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what the folder has of an FP8 weight whose bytes it keeps."""
    export, parts = made.export, made.parts
    with _full_codes(engine.optimizer, weight) as codes:
        if codes is not None:
            yield from export.stored(name, parts.gather_fp8(name, codes, weight._fp8.scale_inv, export.own))
            return
    yield from export.stored(name, parts.gather_fp8(name, *export.own_bytes(name, _master(weight)), export.own))


@contextmanager
def _full_codes(optimizer: Any, weight: Any) -> Iterator[Tensor | None]:
    """Give the codes of an FP8 weight, float8_e4m3fn, inside the block; None while its layer computes in bf16.

    In ZeRO-3 a byte an element is gathered, unless the weight is gathered already.

    Args:
        optimizer: of the engine that trains it.
        weight: a Parameter with a payload.
    """
    payload = weight._fp8
    if not hasattr(weight, "ds_id"):
        yield payload.data if payload.hp is None else None
        return
    (shard,) = optimizer.fp8.shards.of([weight])
    if shard.in_bf16:
        yield None
        return
    if (codes := payload.data) is not None:
        yield codes.detach()
        return
    optimizer.fp8.shards.gather([shard]).wait()
    try:
        yield payload.data.detach()
    finally:
        shard.leave()


@contextmanager
def _full_value(parameter: Any) -> Iterator[Tensor]:
    """Give a parameter's value in its dtype inside the block; of an FP8 weight it is de-quantised."""
    if not hasattr(parameter, "ds_id"):
        yield parameter.detach()
        return
    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def _full_master(parameter: Any) -> Tensor | None:
    """Return a parameter's fp32 master; None without one. Collective in all stages."""
    master: Tensor | None = safe_get_full_fp32_param(parameter)
    return None if master is None else master.detach().view(getattr(parameter, "ds_shape", parameter.shape))


def _master(weight: Any) -> Tensor:
    """Return the fp32 master of an FP8 weight; what a frozen one holds."""
    if (master := _full_master(weight)) is not None:
        return master
    with _full_value(weight) as value:
        return value.clone()


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of `module`, in the order of its state_dict, each once."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        kept = [(name, b) for name, b in child._buffers.items() if name not in child._non_persistent_buffers_set]
        for name, tensor in [*child._parameters.items(), *kept]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


def save_folder(engine: Any, folder: Path, form: str | None) -> None:
    """Save what `tensors_of` yields as the folder `folder`, on rank 0. See `Fp8Engine.save_fp8_pretrained`."""
    what = "save_fp8_pretrained"
    config = getattr(engine.module, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise UnsupportedError(
            f"{what}: expected a model of transformers, whose config.json servers need, got {type(engine.module)}. Use "
            "engine.save_checkpoint and `fp8-ds convert --to fp8 --model FOLDER`."
        )
    made = export_of_engine(engine, form, what)
    export = made.export
    folder, is_writer = folder.resolve(), ds_comm.get_rank() == 0
    staging, tensors = folders.beside(folder, folders.INCOMPLETE), tensors_of(engine, made)

    def write() -> None:
        if is_writer:
            on_cpu = ((name, tensor.cpu()) for name, tensor in tensors)
            write_tensors(on_cpu, staging)

    def drain() -> None:
        """Take the rest, after an error, too: other ranks wait in its collectives."""
        for _ in tensors:
            pass

    try:
        _on_all(folder, lambda: _begin(engine.module, folder, staging, export) if is_writer else None)
        _on_all(folder, write, drain)
        _on_all(folder, lambda: _publish(staging, folder) if is_writer else None)
    except BaseException:
        if is_writer:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    say(f"fp8: {what}: {export.describe()}")


def _on_all(folder: Path, *works: Callable[[], None]) -> None:
    """Do all of `works`, each after an error of the one before, too. Collective: what one rank raises, all raise."""
    found: list[Exception] = []
    for work in works:
        try:
            work()
        except Exception as error:
            found.append(error)
    own = found[0] if found else None
    text = "" if own is None else f"{type(own).__name__}: {' '.join(str(own).split())[:_WIDTH]}"
    told = tell_all((own if isinstance(own, Fp8DsError) else None, text, isinstance(own, OSError)))
    for ours, text, is_of_files in told:
        if ours is not None:
            raise ours
        if text:
            remedy = "Make room or choose another folder" if is_of_files else "Change that, and save again"
            raise CheckpointError(
                f"save_fp8_pretrained: expected rank 0 to write {str(folder)!r}, got {text.rstrip('.')}. {remedy}."
            ) from own


def _begin(model: Any, folder: Path, staging: Path, export: Export) -> None:
    """Refuse `folder` if it is no empty one, and write all but weights into `staging`, before anything is gathered."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder: expected an empty folder or none, got {folder} with files. Name another.")
    shutil.rmtree(staging, ignore_errors=True)
    with folders.as_file_errors(staging):
        staging.mkdir(parents=True)
        _write_configuration(model, staging, export)


def _publish(staging: Path, folder: Path) -> None:
    if folder.is_dir():
        folder.rmdir()
    staging.rename(folder)
    folders.sync_folder(folder.parent)


def _write_configuration(model: Any, out: Path, export: Export) -> None:
    """Write config.json, and beside it what the folder has that the model was loaded from: its tokenizer's files."""
    source = Path(getattr(model.config, "name_or_path", "") or "")
    if (source / CONFIG).is_file():
        for path in configuration_files(source):
            shutil.copyfile(path, out / path.name)
    config = copy.deepcopy(model.config)
    config.architectures = [transformers_class(model).__name__]  # by which servers choose the class
    config.save_pretrained(out)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(out)
    text = with_quantization(out / CONFIG, export.quantization_config())
    assert text is not None
    folders.write_text(out / CONFIG, text)
