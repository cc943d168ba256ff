"""Bring a universal checkpoint into the form that another ZeRO stage reads.

    python -m fp8_ds.checkpoint.universal FOLDER STAGE [--trust-pickle]

ds_to_universal.py names and fills its files as the source's stage does, so that DeepSpeed loads them at another world
size, but not at another stage (1 and 2 are alike, 3 differs). The tensors are the same: only names and wrapping change,
and a second call with the old stage goes back. Stock DeepSpeed reads the result likewise. It is made beside the folder,
gets a manifest, and takes its name when it is complete. Files that hold more than data are refused, unless
--trust-pickle says that they may be executed.
Source: deepspeed/checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py:236, runtime/base_optimizer.py:332,
runtime/zero/stage3.py:3653 and 3766 (0.19.8; 0.18.9 is stricter about the wrapping).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint import manifest as manifests
from fp8_ds.checkpoint.adopt import GLOBAL_STATE, adopt
from fp8_ds.checkpoint.contents import deepspeed_classes, read_data
from fp8_ds.checkpoint.manifest import beside
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError, refusals_without_traceback

Load = Callable[[Path], Any]

TENSORS = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
"""Files of a parameter, within zero/NAME."""
_STAGE3_PREFIX = "zero_pp_rank_0_"
_NUM_SHOWN = 3


def prepare_universal(folder: Path, stage: int, trust_pickle: bool = False) -> None:
    """The universal checkpoint in `folder` loads at ZeRO stage `stage`. One process, not all ranks.

    Args:
        folder: the output folder of ds_to_universal.py.
        stage: 1, 2 or 3.
        trust_pickle: files may hold more than data; then code of whoever wrote them is executed.

    Raises:
        ConfigError: it is no universal checkpoint, or `stage` is none of these.
        CheckpointError: its files are not as they were written (its manifest says so), hold more than data, or are
            pipes, devices or the like.
        UnsupportedError: it was written by several tensor-parallel ranks.
        OSError: of the file system. Whatever is raised, the checkpoint is as it was.
    """
    _check_stage(stage)
    folder = folder.resolve()
    folders.prepare(folder.parent, folder.name)  # a call before may have been killed
    refuse_damage(folder)
    try:
        staging = beside(folder, folders.INCOMPLETE)
        if folder.is_dir():
            manifests.files_in(folder, "")  # a pipe or a device is no file
            shutil.copytree(folder, staging, copy_function=_link_or_copy)
        with folders.as_file_errors(folder, staging):
            rewrite_universal(staging, folder, stage, trust_pickle)
        commit = folders.Commit(folder.parent, folder.name, adopt(staging, trust_pickle), is_latest=False)
        commit.stage()
        commit.publish()
        commit.finish()
    finally:
        folders.discard(folder.parent, folder.name)


def refuse_damage(folder: Path) -> None:
    """The files of `folder` are as its manifest says, if it has one.

    Raises:
        CheckpointError: they are not.
    """
    manifest = manifests.read_manifest(folder)
    files = {} if manifest is None else manifest.files
    problems = [text for name, entry in files.items() if (text := manifests.damage(folder, name, entry))]
    if problems:
        raise CheckpointError(
            f"universal checkpoint: expected a whole one, got: {'; '.join(problems[:_NUM_SHOWN])}. Convert it again."
        )


def _check_stage(stage: int) -> None:
    if stage not in (1, 2, 3):
        raise ConfigError(f"stage: expected 1, 2 or 3, got {stage!r}. Name the stage that is to load the checkpoint.")


def rewrite_universal(folder: Path, name: Path, stage: int, trust_pickle: bool) -> None:
    """The files in `folder`, a copy of the universal checkpoint `name`, are as ZeRO stage `stage` reads them.

    Files are replaced, never written into: they may be links to those of `name`. Raises: as `prepare_universal`.
    """
    _check_stage(stage)
    files = [*folder.glob("mp_rank_*_model_states.pt"), *folder.glob(f"{_STAGE3_PREFIX}mp_rank_*_model_states.pt")]
    state_path = folder / GLOBAL_STATE
    if not files or not state_path.exists():
        raise ConfigError(
            f"universal checkpoint: expected model files and {GLOBAL_STATE} in {str(name)!r}, got none. "
            "Name the output folder of ds_to_universal.py."
        )
    names = {file.name.removeprefix(_STAGE3_PREFIX) for file in files}
    if len(names) > 1:
        if all(file.name.startswith(_STAGE3_PREFIX) == (stage == 3) for file in files):
            return  # the stage that wrote it, or stages 1 and 2, which read each other's
        raise UnsupportedError(
            "universal checkpoint: expected one tensor-parallel rank, to go from stage 3 to another or back, got "
            f"{len(names)}. Name the stage that wrote it."
        )
    file_name = names.pop()
    for target in (folder / file_name, folder / f"{_STAGE3_PREFIX}{file_name}"):
        if not target.exists():
            shutil.copyfile(files[0], target)
    load = _trusting if trust_pickle else _careful
    model_state = load(files[0])
    _complete_global_state(state_path, model_state["ds_version"], load)
    shapes = {key: shape for group in model_state["param_shapes"] for key, shape in group.items()}
    manifests.refuse_paths(shapes, files[0])
    for key, shape in shapes.items():
        for tensor in TENSORS:
            _rewrap(folder / "zero" / key / tensor, shape, load, flat=stage == 3)


def _link_or_copy(source: str, target: str) -> None:
    """`target` is the same file as `source`; of a link a copy, for to write into that would be to write elsewhere."""
    if Path(source).is_symlink():
        shutil.copy2(source, target)
    else:
        folders.link(source, target)


def _trusting(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _careful(path: Path) -> Any:
    """DeepSpeed's own files hold objects of its classes (the loss scaler), and nothing else but data."""
    return read_data(path, deepspeed_classes())


def _complete_global_state(path: Path, version: Any, load: Load) -> None:
    """Add what the other stages look for: the version, the step by parameter, the step within a state_dict."""
    state = load(path)
    parameters = sorted(file.parent for file in path.parent.glob("**/exp_avg.pt"))
    if "optimizer_state_dict" in state:
        steps = [entry["step"] for entry in state["optimizer_state_dict"]["state"].values() if "step" in entry]
        for parameter in parameters:
            if steps and not (parameter / "step.pt").exists():
                torch.save(steps[0], parameter / "step.pt")
    else:
        file = next((p / "step.pt" for p in parameters if (p / "step.pt").exists()), None)
        entry = {} if file is None else {"step": load(file)}
        state["optimizer_state_dict"] = {"state": {0: entry}, "param_groups": state["param_groups"]}
    state.setdefault("ds_version", version)
    _replace(state, path)


def _rewrap(path: Path, shape: Any, load: Load, flat: bool) -> None:
    """One tensor file: a bare flat tensor (stage 3), or a dict with the tensor in its shape (stages 1 and 2)."""
    if not path.exists():
        return
    content = load(path)
    if flat and isinstance(content, dict):
        _replace(content["param"].reshape(-1).clone(), path)
    elif not flat and not isinstance(content, dict):
        _replace({"param": content.reshape(shape).clone()}, path)


def _replace(content: Any, path: Path) -> None:
    temporary = beside(path, ".tmp")
    torch.save(content, temporary)
    temporary.replace(path)


if __name__ == "__main__":
    trusts = "--trust-pickle" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--trust-pickle"]
    if len(arguments) != 2 or not arguments[1].isdigit():
        raise SystemExit("use: python -m fp8_ds.checkpoint.universal FOLDER STAGE [--trust-pickle]")
    with refusals_without_traceback():
        prepare_universal(Path(arguments[0]), int(arguments[1]), trusts)
