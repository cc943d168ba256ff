"""Safe reads of files of torch.save: tensors, builtin types, and classes on a list. Nothing in them is executed.

`torch.load(weights_only=True)` calls only what is on a list, and reads no tensor that goes to the meta device: so a
file is checked for the price of its pickle, before any loader that executes pickles.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import pathlib
import types
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from fp8_ds.errors import CheckpointError


def _member(owner: Any, name: Any) -> enum.Enum:
    """Return the member `name` of an enumeration: all that a pickle may use `getattr` for.

    Python 3.11.0 to 3.11.3 pickle a member so, such as the ZeRO stage in DeepSpeed's optimizer files.
    """
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise TypeError(f"expected a member of an enumeration, got getattr({owner!r}, {name!r})")
    return owner.__members__[name]


_NUMPY_FUNCTIONS: list[Any] = [np.empty(0).__reduce__()[0], np.float64().__reduce__()[0]]
_ALLOWED: list[Any] = [
    *(DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address),
    (_member, "builtins.getattr"),
    *(argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, pathlib.PurePosixPath, np.ndarray, np.dtype),
    *(datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone),
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    *((f, f"numpy.{core}.multiarray.{f.__name__}") for core in ("core", "_core") for f in _NUMPY_FUNCTIONS),
]
"""Classes allowed beside torch's own list and torch.serialization.add_safe_globals: those in ZeRO's optimizer files,
and those of the standard library and numpy that client states commonly have and that only hold data."""


def read_structure(path: Path) -> Any:
    """Read what `torch.load` would return, with tensors on the meta device. It raises as `read_data` does."""
    return read_data(path, "meta")


def read_data(path: Path, device: str = "cpu", *, is_mapped: bool = False) -> Any:
    """Read what `torch.load` returns, if it can without executing anything.

    Args:
        path: path of a file of torch.save.
        device: device of all tensors.
        is_mapped: whether bytes of tensors are read on access only, where the file's form allows it.

    Raises:
        CheckpointError: the file cannot be read so.
    """
    try:
        with safe_globals(_ALLOWED):
            return torch.load(path, map_location=device, weights_only=True, mmap=is_mapped and is_zipfile(path))
    except Exception as error:  # of pickle, zip files, torch: whatever is in the file
        names = ", ".join(unknown_names(path))
        found = f"what torch.load(weights_only=True) refuses ({type(error).__name__}: {str(error)[:200]})"
        trusting = "If you trust the checkpoint, call torch.serialization.add_safe_globals([...]) with these before, or"
        remedy = f"{trusting} keep them out of client_state." if names else "Load another checkpoint."
        raise CheckpointError(f"{path}: expected tensors and plain data, got {names or found}. {remedy}") from error


def unknown_names(path: Path) -> list[str]:
    """Name the classes and functions in the file's pickle that are on no list; none if that cannot be read."""
    try:
        with safe_globals(_ALLOWED):
            return sorted(get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # the caller reports what torch.load said
        return []
