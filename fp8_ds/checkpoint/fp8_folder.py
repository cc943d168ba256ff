"""FP8 model folders as servers read them: weights [out, in] in float8_e4m3fn, beside float scales that multiply.

- quant_method "fp8", a scale for each 128 x 128 elements in `X.weight_scale_inv`: DeepSeek-V3, Qwen3-FP8.
- quant_method "compressed-tensors", a scale for each row in `X.weight_scale`: what llm-compressor writes for dynamic
  activations.

A block is rows and columns i // 128, cut at the edges. transformers' loader takes its size from the shapes instead, and
is wrong where it divides.

Sources: transformers 5.24, quantizers/quantizer_finegrained_fp8.py; compressed-tensors 0.20, config/base.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_ds.checkpoint.folders import refuse_special
from fp8_ds.checkpoint.model_folder import TensorFiles
from fp8_ds.config.explain import parse_json
from fp8_ds.errors import CheckpointError, UnsupportedError
from fp8_ds.nn.linear.payload import ROW, TILE, Granularity, per_element
from fp8_ds.ops.blockwise import BLOCK

CONFIG = "config.json"
_KEYS = ("quantization_config", "compression_config")
_PRESET = "FP8_DYNAMIC"
"""compressed-tensors' name for this group, which may have targets alone."""
_OTHER_FP8 = tuple(getattr(torch, f"float8_{name}") for name in ("e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))
_OF_SERVING = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of names of scales of activations, one number each, which training makes for itself."""


@dataclass(frozen=True)
class ServingFormat:
    """How a folder stores FP8 weights.

    Attributes:
        scale: last part of a scale's name, beside `weight`.
        granularity: which elements of a weight share one.
    """

    scale: str
    granularity: Granularity


BLOCKS = ServingFormat("weight_scale_inv", TILE)
ROWS = ServingFormat("weight_scale", ROW)


def format_of(source: Path) -> ServingFormat | None:
    """Return how the model folder `source` stores FP8 weights, by its config.json; None if that names no FP8.

    Raises:
        CheckpointError: config.json is no JSON object.
        UnsupportedError: it is quantised in another way.
    """
    path = source / CONFIG
    if not os.path.lexists(path):
        return None
    refuse_special([path])
    config = _read(path)
    given = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{path}: expected an object in {_KEYS[0]}, got {given!r}. Copy the model again.")
    if (method := given.get("quant_method")) == "fp8":
        _expect(path, "fmt", given.get("fmt", "e4m3"), "e4m3")
        _expect(path, "weight_block_size", given.get("weight_block_size"), [BLOCK, BLOCK])
        return BLOCKS
    _expect(path, "quant_method", method, "compressed-tensors")
    _expect(path, "format", given.get("format"), "float-quantized")
    _expect(path, "transform_config", given.get("transform_config") or {}, {})
    groups = given.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"{path}: expected an object in config_groups, got {groups!r}. Copy the model again.")
    for name, group in groups.items():
        if name == _PRESET and not isinstance(group, Mapping):
            continue
        weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
        for key, expected in (("type", "float"), ("num_bits", 8), ("strategy", "channel"), ("symmetric", True)):
            got = weights.get(key, True if key == "symmetric" else None)
            _expect(path, f"config_groups.{name}.weights.{key}", got, expected)
    return ROWS


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}. Copy the model again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(content).__name__}. Copy the model again.")
    return content


def _expect(path: Path, key: str, got: Any, expected: Any) -> None:
    if got != expected:
        known = 'E4M3 weights of quant_method "fp8" in blocks of 128 x 128, or of "compressed-tensors" by rows'
        raise UnsupportedError(
            f"{path}: expected {key} {json.dumps(expected)} in {_KEYS[0]}, got {json.dumps(got)}. What can be read are "
            f"{known}: take a model in one of these forms, or its bf16 weights."
        )


def with_quantization(path: Path, given: dict[str, Any] | None) -> str | None:
    """Return the text of the config.json `path` for the same model in bf16, or in FP8 as `given` says.

    None: the file says the same.
    """
    config = _read(path)
    if given is None and config.keys().isdisjoint(_KEYS):
        return None
    config = {key: value for key, value in config.items() if key not in _KEYS}
    if given is not None:
        # By its own rule transformers would take the dtype of the first tensor, which may be a scale.
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config |= {"dtype": "bfloat16", _KEYS[0]: given}
    return json.dumps(config, indent=2) + "\n"


def value_readers(source: Path, stored: ServingFormat, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return functions that read the tensors of an FP8 model folder, by name: FP8 weights as bytes times scales, the
    others as they are.

    Products are rounded to float32, and then to `dtype`: with scales that are powers of two both are exact. Scales of
    activations and of the KV cache are left out.

    All scales are read and checked here, before any weight.

    Raises:
        CheckpointError: a file is damaged or missing, an FP8 weight has no scale, a scale no FP8 weight, or it has
            another shape than the weight's, or a value that is no scale.
        UnsupportedError: a tensor is in another FP8 format than E4M3, or not of two dimensions.
    """
    files = TensorFiles(source)
    found: dict[str, Callable[[], Tensor]] = {}
    for name in files.names:
        dtype_here, (stem, _, last) = files.dtype(name), name.rpartition(".")
        if name.endswith(_OF_SERVING) and files.shape(name) in ((), (1,)):
            continue
        if last == stored.scale:
            if files.dtype(weight := f"{stem}.weight") != torch.float8_e4m3fn:
                raise CheckpointError(
                    f"{files.path(name)}: expected {weight} in float8_e4m3fn beside {name}, got "
                    f"{files.dtype(weight) or 'none'}. Copy the model again."
                )
        elif dtype_here in _OTHER_FP8:
            raise UnsupportedError(
                f"{files.path(name)}: expected weights in float8_e4m3fn, got {name} in {dtype_here}. Take the "
                "model's bf16 weights."
            )
        elif dtype_here == torch.float8_e4m3fn:
            _scale_of(files, name, stored)
            found[name] = partial(_value, files, name, stored, dtype)
        else:
            found[name] = partial(files.read, name)
    return found


def _value(files: TensorFiles, name: str, stored: ServingFormat, dtype: torch.dtype) -> Tensor:
    weight = files.read(name).float()
    if bool(weight.isnan().any()):
        raise CheckpointError(f"{files.path(name)}: expected numbers, got NaN in {name}. Copy the model again.")
    return weight.mul_(per_element(_scale_of(files, name, stored), weight.shape)).to(dtype)


def _scale_of(files: TensorFiles, name: str, stored: ServingFormat) -> Tensor:
    """Return the scales of the FP8 weight `name`, float32 [grid]."""
    stem, _, last = name.rpartition(".")
    scale_name, shape = f"{stem}.{stored.scale}", files.shape(name)
    if len(shape) != 2 or last != "weight":
        raise UnsupportedError(
            f"{files.path(name)}: expected FP8 weights [out, in], X.weight, got {name} {shape}. Take the model's bf16 "
            "weights."
        )
    if files.dtype(scale_name) is None:
        raise CheckpointError(
            f"{files.path(name)}: expected {scale_name} beside {name}, which is in FP8, got none. Copy the model again."
        )
    scale, grid = files.read(scale_name), stored.granularity.grid(shape)
    if tuple(scale.shape) != grid:
        raise CheckpointError(
            f"{files.path(scale_name)}: expected {scale_name} of shape {list(grid)} for a weight {list(shape)}, got "
            f"{list(scale.shape)}. Copy the model again."
        )
    if scale.dtype == torch.uint8:  # exponents of powers of two, as "scale_fmt": "ue8m0" may store them
        scale = scale.view(torch.float8_e8m0fnu)
    is_number = scale.is_floating_point()
    scale = scale.float()
    if not is_number or not bool((scale.isfinite() & (scale >= 0)).all()):
        raise CheckpointError(
            f"{files.path(scale_name)}: expected scales that are numbers, finite and not negative, got others in "
            f"{scale_name}. Copy the model again."
        )
    return scale
