"""Check of an FP8 folder: transformers loads it, de-quantised on the CPU, and has codes times scales bit for bit.

Source: transformers 5.24, integrations/finegrained_fp8.py `Fp8Dequantize`, integrations/compressed_tensors.py
`CompressedTensorsDequantize`.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import torch

from fp8_ds.checkpoint.fp8_folder import BLOCKS, format_of, value_readers
from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.checkpoint.serving import FORMATS, Export
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.ops.blockwise import BLOCK

_PACKAGES = {"fp8-block": ("transformers", "accelerate"), "compressed-tensors": ("transformers", "compressed_tensors")}
_CONFIGS = {"fp8-block": "FineGrainedFP8Config", "compressed-tensors": "CompressedTensorsConfig"}
_LEAVE_OUT = "Or leave --verify out."


def refuse_to_verify(export: Export) -> None:
    """Raise an error if what `export` is about to write cannot be verified here."""
    for package in _PACKAGES[export.form]:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--verify: expected {package.replace('_', '-')}, by which {export.form} is loaded, got none. "
                f"Install it. {_LEAVE_OUT}"
            )
    import transformers

    kind = getattr(transformers, _CONFIGS[export.form], None)
    can_load = kind is not None and "dequantize" in inspect.signature(kind.__init__).parameters
    if not can_load or not makes_plain_models(export.form):
        raise ConfigError(
            f"--verify: expected a transformers that makes a plain model of {export.form}, got {_version()}. Update "
            f"it. {_LEAVE_OUT}"
        )
    if export.names.model is None:
        raise UnsupportedError(
            f"--verify: expected a model that transformers loads, got {export.names.reason}. "
            f"Name its folder by --model. {_LEAVE_OUT}"
        )
    for name, shape in export.matrices.items():
        # The loader divides sizes by the number of blocks.
        if FORMATS[export.form] is BLOCKS and any(size > BLOCK and size % BLOCK for size in shape):
            raise UnsupportedError(
                f"--verify: expected sizes that are multiples of {BLOCK}, got {name} {list(shape)}, of which "
                f"transformers' loader takes blocks of another size. Take --format compressed-tensors. {_LEAVE_OUT}"
            )


def makes_plain_models(form: str) -> bool:
    """Whether transformers de-quantises such folders on loading: that of compressed-tensors keeps scales until 5.17."""
    if form != "compressed-tensors":
        return True
    from transformers.integrations import compressed_tensors

    return hasattr(compressed_tensors, "CompressedTensorsDequantize")


def verify(out: Path) -> str:
    """Compare what transformers reads in the FP8 folder `out` with codes times scales, and say so in a line.

    Both are in the dtypes that transformers gives, and in memory as a whole.

    Raises:
        CheckpointError: transformers does not load it, or not all of it, or other values.
    """
    stored, names = format_of(out), SavedNames.of_folder(out)
    assert stored is not None
    form = next(name for name, value in FORMATS.items() if value is stored)
    loaded, info = _load(out, type(names.model), _CONFIGS[form])
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if odd := sorted(map(str, info[kind])):
            raise _different(out, f"transformers found {kind.replace('_', ' ')}: {', '.join(odd[:3])}")
    tensors, num_equal = loaded.state_dict(), 0
    for name, expected in names.loaded(value_readers(out, stored, torch.float32)):
        if name not in tensors:
            raise _different(out, f"transformers did not load {name}")
        if tuple(tensors[name].shape) != names.shapes.get(name, tuple(tensors[name].shape)):
            raise _different(out, f"{name} is {list(tensors[name].shape)}, and by config.json {names.shapes[name]}")
        if not torch.equal(tensors[name], expected.to(tensors[name].dtype)):
            raise _different(out, f"transformers reads other values in {name}")
        num_equal += 1
    return f"verified: transformers {_version()} reads codes times scales, in all of {num_equal} tensors"


def _different(out: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"--verify: expected transformers to read codes times scales in {out}, got another model: {found}. Do not "
        "serve it, and report it to us."
    )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _load(out: Path, model_class: Any, config: str) -> tuple[Any, dict[str, Any]]:
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the folder's configuration counts
            found: tuple[Any, dict[str, Any]] = model_class.from_pretrained(
                out,
                quantization_config=getattr(transformers, config)(dequantize=True),
                dtype=torch.bfloat16,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever it finds wrong
        raise _different(out, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return found
