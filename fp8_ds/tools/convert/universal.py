"""Universal checkpoints: bring one into the form that another ZeRO stage reads, or make one of weights.

ds_to_universal.py names and wraps its files as the source's stage does, so that DeepSpeed loads them at another world
size, but not at another stage (1 and 2 are alike, 3 differs). The tensors are the same, and a second call with the old
stage goes back. DeepSpeed without fp8_ds reads the result, too.
Source: deepspeed/checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py:236, runtime/base_optimizer.py:332,
runtime/engine.py:4568, runtime/zero/stage3.py:3653 and 3766 (0.19.8; 0.18.9 is stricter about the wrapping).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import is_zipfile

import deepspeed
import torch
from torch import Tensor

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.contents import read_data
from fp8_ds.checkpoint.folders import GLOBAL_STATE, TENSORS
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError

_MODEL_FILE, _STAGE3_PREFIX = "mp_rank_00_model_states.pt", "zero_pp_rank_0_"
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
_NUM_SHOWN = 3


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """Yield a folder to write a universal checkpoint into; it then gets a manifest and replaces `out`."""
    save = folders.Save(out.parent, out.name, uuid4().hex[:8], is_latest=False)
    save.prepare()  # a call before may have been killed
    save.staging.mkdir(parents=True)
    try:
        with folders.as_file_errors(save.staging):
            yield save.staging
            save.stage(folders.seal_universal(save.staging, out.name))
            save.publish()
    except BaseException:
        save.undo()
        raise
    save.finish()


def check_universal(folder: Path, trust_pickle: bool) -> None:
    """Check that all files are as they were written, and hold data only unless they are trusted."""
    refuse_damage(folder, "Convert it again.")
    for name in folders.own_files(folder):
        read_file(folder / name, trust_pickle)


def refuse_damage(folder: Path, remedy: str) -> folders.Manifest | None:
    """Check the files of `folder` against its manifest, and return that; None if it has none.

    Raises:
        CheckpointError: a file is missing or differs.
    """
    if (manifest := folders.read_manifest(folder)) is not None:
        problems = [text for name, entry in manifest.files.items() if (text := folders.damage(folder, name, entry))]
        if problems:
            raise CheckpointError(
                f"{folder}: expected a whole checkpoint, got: {'; '.join(problems[:_NUM_SHOWN])}. {remedy}"
            )
    return manifest


def read_file(path: Path, trust_pickle: bool, device: str = "meta", *, is_mapped: bool = False) -> Any:
    """Return what `torch.load` does, `is_mapped`: with bytes of tensors read on access.

    Raises:
        CheckpointError: it holds more than data, and is not trusted.
    """
    if trust_pickle:
        return torch.load(path, map_location=device, weights_only=False, mmap=is_mapped and is_zipfile(path))
    try:
        return read_data(path, device, is_mapped=is_mapped)
    except CheckpointError as error:
        raise CheckpointError(f"{error} To execute what a file names, add --trust-pickle.") from error


def tensor_in(content: Any) -> Tensor:
    """Return the tensor of a parameter's file, which stages 1 and 2 wrap."""
    tensor: Tensor = content["param"] if isinstance(content, dict) else content
    return tensor


def shapes_in(model_state: Any, file: Path) -> dict[str, Any]:
    """Return the shapes of the trainable parameters by name, from the content of the model file `file`."""
    shapes = {name: shape for group in model_state["param_shapes"] for name, shape in group.items()}
    folders.refuse_paths(shapes, file)
    return shapes


def rewrite(folder: Path, stage: int, trust_pickle: bool, name: Path) -> None:
    """Bring the files in `folder`, no link among them, into the form of `stage`; errors speak of `name`."""
    if stage not in (1, 2, 3):
        raise ConfigError(f"stage: expected 1, 2 or 3, got {stage!r}. Name the stage that is to load the checkpoint.")
    files = [path for prefix in ("", _STAGE3_PREFIX) for path in folder.glob(f"{prefix}mp_rank_*_model_states.pt")]
    if not files:
        raise ConfigError(
            f"universal checkpoint: expected model files in {str(name)!r}, got none. Name the output folder of "
            "ds_to_universal.py."
        )
    names = {file.name.removeprefix(_STAGE3_PREFIX) for file in files}
    if len(names) > 1:
        if all(file.name.startswith(_STAGE3_PREFIX) == (stage == 3) for file in files):
            return  # the stage that wrote it, or stages 1 and 2, which read each other's
        raise UnsupportedError(
            "universal checkpoint: expected one tensor-parallel rank, to go from stage 3 to another or back, got "
            f"{len(names)}. Name the stage that wrote it."
        )
    for prefix in ("", _STAGE3_PREFIX):
        if not (target := folder / f"{prefix}{min(names)}").exists():
            shutil.copyfile(files[0], target)
    model_state = read_file(files[0], trust_pickle)
    shapes = shapes_in(model_state, name / files[0].name)
    _complete_global_state(folder, model_state["ds_version"], trust_pickle)
    for path, shape in ((folder / "zero" / key / file, shape) for key, shape in shapes.items() for file in TENSORS):
        content = read_file(path, trust_pickle, "cpu") if path.exists() else None
        if stage == 3 and isinstance(content, dict):
            torch.save(content["param"].reshape(-1).clone(), path)  # bare and flat
        elif stage != 3 and isinstance(content, Tensor):
            torch.save({"param": content.reshape(shape).clone()}, path)


def _complete_global_state(folder: Path, version: Any, trust_pickle: bool) -> None:
    """Add what the other stages look for: the version, the step by parameter, the step within a state_dict."""
    state = read_file(folder / GLOBAL_STATE, trust_pickle, "cpu")
    places = [path.with_name("step.pt") for path in sorted(folder.glob("**/exp_avg.pt"))]
    if inner := state.get("optimizer_state_dict"):
        step = next((entry["step"] for entry in inner["state"].values() if "step" in entry), None)
        for place in places:
            if step is not None and not place.exists():
                torch.save(step, place)
    else:
        entry = next(({"step": read_file(place, trust_pickle, "cpu")} for place in places if place.exists()), {})
        state["optimizer_state_dict"] = {"state": {0: entry}, "param_groups": state["param_groups"]}
    torch.save({"ds_version": version, **state}, folder / GLOBAL_STATE)


def write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, stage: int, name: Path) -> None:
    """Fill `folder` with a universal checkpoint: masters from `tensors`, both moments zero, step 0.

    One weight is in memory at a time, and moments take no room on the disk. An engine that loads it keeps its own
    parameter groups, learning rates and scheduler.

    Args:
        tensors: names and tensors of bf16, fp16 or fp32. Integers are left out: no engine reads such buffers.
        folder: an empty folder.
        stage: ZeRO stage that is to load it.
        name: source of the tensors, for errors.
    """
    shapes: dict[str, torch.Size] = {}
    for key, tensor in tensors:
        folders.refuse_paths([key], name)
        if tensor.dtype in _WEIGHTS:
            shapes[key] = tensor.shape
            (folder / "zero" / key).mkdir(parents=True)
            moment = torch.zeros((), dtype=torch.float32).expand(tensor.shape)  # one element in the file
            for file, value in zip(TENSORS, (tensor.float(), moment, moment), strict=True):
                content = value.view(-1) if stage == 3 else {"param": value, "cat_dim": 0}
                torch.save(content, folder / "zero" / key / file)
            torch.save(torch.tensor(0.0), folder / "zero" / key / "step.pt")  # torch's Adam counts in tensors
        elif tensor.is_floating_point():
            raise UnsupportedError(
                f"safetensors: expected bf16, fp16 or fp32, got {key} in {tensor.dtype}. Make bf16 safetensors of it."
            )
    if not shapes:
        raise ConfigError(f"safetensors: expected weights in {name}, got none. Name the folder of a model.")
    groups: list[dict[str, Any]] = [{} for _ in shapes]  # nothing to take over; an engine has no more of them
    state = {"state": {0: {"step": torch.tensor(0.0)}}, "param_groups": groups}
    torch.save({"param_groups": groups, "optimizer_state_dict": state}, folder / GLOBAL_STATE)
    model_state = {
        "module": {},
        "param_shapes": [shapes],
        # LambdaLR, SequentialLR and ChainedScheduler ask for the lists. All schedulers stay at their start.
        "lr_scheduler": {"last_batch_iteration": -1, "lr_lambdas": [], "_schedulers": []},
        "ds_version": str(deepspeed.__version__),
    }
    counts = {"global_steps": 0, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    torch.save(model_state | counts, folder / _MODEL_FILE)
    rewrite(folder, stage, False, name)
