"""Bring a universal checkpoint into the form that another ZeRO stage reads.

    python -m fp8_ds.checkpoint.universal FOLDER STAGE [--trust-pickle]

ds_to_universal.py names and fills its files as the source's stage does, so that DeepSpeed loads them at another world
size, but not at another stage (1 and 2 are alike, 3 differs). The tensors are the same: only names and wrapping change,
in place, and a second call with the old stage goes back. Stock DeepSpeed reads the result likewise. Files that hold
more than data are refused, unless --trust-pickle says that they may be executed.
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

from fp8_ds.checkpoint.contents import deepspeed_classes, read_data
from fp8_ds.errors import ConfigError, UnsupportedError

Load = Callable[[Path], Any]

_STAGE3_PREFIX = "zero_pp_rank_0_"
_TENSORS = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")


def prepare_universal(folder: Path, stage: int, trust_pickle: bool = False) -> None:
    """The universal checkpoint in `folder` loads at ZeRO stage `stage`. One process, not all ranks.

    Args:
        folder: the output folder of ds_to_universal.py.
        stage: 1, 2 or 3.
        trust_pickle: files may hold more than data; then code of whoever wrote them is executed.

    Raises:
        ConfigError: it is no universal checkpoint, or `stage` is none of these; nothing is changed then.
        CheckpointError: a file holds more than data.
        UnsupportedError: it was written by several tensor-parallel ranks.
    """
    if stage not in (1, 2, 3):
        raise ConfigError(f"stage: expected 1, 2 or 3, got {stage!r}. Name the stage that is to load the checkpoint.")
    files = [*folder.glob("mp_rank_*_model_states.pt"), *folder.glob(f"{_STAGE3_PREFIX}mp_rank_*_model_states.pt")]
    state_path = folder / "zero/optimizer_state.pt"
    if not files or not state_path.exists():
        raise ConfigError(
            f"universal checkpoint: expected model files and zero/optimizer_state.pt in {str(folder)!r}, got none. "
            "Name the output folder of ds_to_universal.py."
        )
    names = {file.name.removeprefix(_STAGE3_PREFIX) for file in files}
    if len(names) > 1:
        raise UnsupportedError(
            f"universal checkpoint: expected one tensor-parallel rank, got {len(names)}. "
            "Load it with the ZeRO stage that wrote it."
        )
    name = names.pop()
    for target in (folder / name, folder / f"{_STAGE3_PREFIX}{name}"):
        if not target.exists():
            shutil.copyfile(files[0], target)
    load = _trusting if trust_pickle else _careful
    model_state = load(files[0])
    _complete_global_state(state_path, model_state["ds_version"], load)
    shapes = {key: shape for group in model_state["param_shapes"] for key, shape in group.items()}
    for key, shape in shapes.items():
        for tensor in _TENSORS:
            _rewrap(folder / "zero" / key / tensor, shape, load, flat=stage == 3)


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
    torch.save(state, path)


def _rewrap(path: Path, shape: Any, load: Load, flat: bool) -> None:
    """One tensor file: a bare flat tensor (stage 3), or a dict with the tensor in its shape (stages 1 and 2)."""
    if not path.exists():
        return
    content = load(path)
    if flat and isinstance(content, dict):
        torch.save(content["param"].reshape(-1).clone(), path)
    elif not flat and not isinstance(content, dict):
        torch.save({"param": content.reshape(shape).clone()}, path)


if __name__ == "__main__":
    trusts = "--trust-pickle" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--trust-pickle"]
    if len(arguments) != 2 or not arguments[1].isdigit():
        raise SystemExit("use: python -m fp8_ds.checkpoint.universal FOLDER STAGE [--trust-pickle]")
    prepare_universal(Path(arguments[0]), int(arguments[1]), trusts)
