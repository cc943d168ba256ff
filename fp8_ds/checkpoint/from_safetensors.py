"""Weights of safetensors as a universal checkpoint: masters from the tensors, both moments zero, step 0.

An engine takes from it what it takes from any universal checkpoint: the masters of its trainable parameters, by name,
at any world size. What safetensors do not hold stays as the engine has it: parameter groups with their learning rates,
and the scheduler.
Source of the layout: deepspeed/checkpoint/ds_to_universal.py, runtime/engine.py:4568, runtime/base_optimizer.py:332,
runtime/zero/stage3.py:3653 (0.19.8).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_ds import json_text
from fp8_ds.checkpoint.adopt import GLOBAL_STATE
from fp8_ds.checkpoint.manifest import refuse_paths, refuse_special
from fp8_ds.checkpoint.universal import TENSORS
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError

INDEX = "model.safetensors.index.json"
_MODEL_FILE = "mp_rank_00_model_states.pt"
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH = 60


INSTALL = "pip install safetensors"


def refuse_without_safetensors() -> None:
    """Nothing happens if safetensors can be read and written here.

    Raises:
        ConfigError: the package cannot be imported.
    """
    try:
        import safetensors.torch  # noqa: F401  # only to see whether it can
    except ImportError as error:
        raise ConfigError(
            f"safetensors: expected the package to be installed, got {str(error).rstrip('.')}. Run: {INSTALL}"
        ) from error


def write_universal(source: Path, out: Path, stage: int) -> None:
    """`out` has the tensors of a universal checkpoint for ZeRO stage `stage`. Not yet all of its files:
    `rewrite_universal` makes those.

    One weight is in memory at a time; moments need no room on the disk.

    Args:
        source: a folder of safetensors, of bf16, fp16 or fp32. Tensors of integers are buffers, and are left out:
            engines read no buffer of a universal checkpoint.
        out: is made.

    Raises:
        CheckpointError: a file is damaged or no file, a tensor is in two files, or the index names one that is in none.
        UnsupportedError: a tensor is of another type, FP8 for one, whose scale is elsewhere.
        ConfigError: there is no weight.
        OSError: a file cannot be read or written.
    """
    out.mkdir(parents=True)
    shapes: OrderedDict[str, torch.Size] = OrderedDict()
    for name, tensor in _tensors(source):
        if tensor.dtype not in _WEIGHTS:
            if not tensor.is_floating_point():
                continue
            raise UnsupportedError(
                f"safetensors: expected bf16, fp16 or fp32, got {name} in {tensor.dtype}. Make bf16 safetensors of it."
            )
        folder = out / "zero" / name
        folder.mkdir(parents=True)
        nothing = torch.zeros((), dtype=torch.float32).expand(tensor.shape)  # one element in the file
        for file, value in zip(TENSORS, (tensor.float(), nothing, nothing), strict=True):
            torch.save(value.view(-1) if stage == 3 else {"param": value, "cat_dim": 0}, folder / file)
        torch.save(torch.tensor(0.0, dtype=torch.float32), folder / "step.pt")  # torch's Adam counts in tensors
        shapes[name] = tensor.shape
    if not shapes:
        raise ConfigError(f"safetensors: expected weights in {source}, got none. Name the folder of a model.")
    torch.save(_global_state(len(shapes)), out / GLOBAL_STATE)
    torch.save(_model_state(shapes), out / _MODEL_FILE)


def _tensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    index = source / INDEX
    listed = _files_by_tensor(index) if os.path.lexists(index) else {}
    missing, seen = set(listed), set()
    paths = sorted({source / name for name in listed.values()} or source.glob("*.safetensors"))
    refuse_special(paths)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no dict
                    if name in seen:
                        raise CheckpointError(
                            f"safetensors: expected each tensor once, got {name} in {path.name} and in another file. "
                            f"Leave one of them in {source}."
                        )
                    refuse_paths([name], path)
                    seen.add(name)
                    missing.discard(name)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: expected safetensors, got a damaged file ({error}). Copy it again."
            ) from error
    if missing:
        raise CheckpointError(
            f"{index}: expected tensors that the files hold, got {len(missing)} that they do not, {min(missing)} among "
            "them. Copy the model again."
        )


def _files_by_tensor(index: Path) -> dict[str, str]:
    """Names of tensors and of the files that they are in."""
    refuse_special([index])
    try:
        content = json_text.parse(index.read_text())
    except ValueError as error:
        content = error
    listed = content.get("weight_map") if isinstance(content, dict) else content
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(
            f'{index}: expected JSON with "weight_map", names of files by names of tensors, got '
            f"{str(listed)[:_WIDTH]}. Copy the model again."
        )
    refuse_paths(listed.values(), index)
    absent = sorted(name for name in set(listed.values()) if not os.path.lexists(index.parent / name))
    if absent:
        raise CheckpointError(f"{index}: expected the files that it lists, got none of {absent[:3]}. Copy them again.")
    return listed


def _global_state(num_groups: int) -> dict[str, Any]:
    """Of the optimizer: nothing that an engine would take over in place of its own.

    DeepSpeed loads as many of its parameter groups as are in the file, and has no more groups than parameters.
    """
    groups: list[dict[str, Any]] = [{} for _ in range(num_groups)]
    state = {"state": {0: {"step": torch.tensor(0.0, dtype=torch.float32)}}, "param_groups": groups}
    return {"param_groups": groups, "optimizer_state_dict": state, "ds_version": _deepspeed_version()}


def _model_state(shapes: OrderedDict[str, torch.Size]) -> dict[str, Any]:
    """What DeepSpeed's load asks of a model file; the scheduler's state leaves DeepSpeed's and torch's at their start:
    LambdaLR, SequentialLR and ChainedScheduler ask for the two lists."""
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": -1, "lr_lambdas": [], "_schedulers": []},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 0,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _deepspeed_version(),
    }


def _deepspeed_version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
