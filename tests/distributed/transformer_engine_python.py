"""Transformer Engine's own Python code of FP8 tensors, without its compiled half: what that would do is done by torch.

The wheel `transformer_engine` has the Python code alone; `make test` puts it beside the environment, not into it, where
an import would look for the rest. Its packages are entered without their `__init__`, which load that.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ROOT = Path(sys.prefix) / "transformer_engine-python" / "transformer_engine"
_COMPILED = "transformer_engine_torch"
_PACKAGES = ("", ".common", ".pytorch", ".pytorch.optimizers", ".debug", ".debug.pytorch")
_DRAWN = "_high_precision_init_val"
_DEBUG = "transformer_engine.debug.pytorch.debug_quantization"


class DType(enum.Enum):
    """Of the compiled half; values as in its header."""

    kByte = 0
    kInt32 = 1
    kFloat32 = 2
    kFloat16 = 3
    kBFloat16 = 4
    kFloat8E4M3 = 5
    kFloat8E5M2 = 6
    kFloat8E8M0 = 7
    kFloat4E2M1 = 8


_TORCH = {DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16, DType.kFloat16: torch.float16}


def _dequantize(x: Any, dtype: DType) -> Tensor:
    with torch._C.DisableTorchFunction():
        value: Tensor = (x._data.view(torch.float8_e4m3fn).float() * x._scale_inv).to(_TORCH[dtype])
    return value


def _transpose(data: Tensor, dtype: DType, out: Tensor | None = None) -> Tensor:
    made = data.t().contiguous()
    return made if out is None else out.copy_(made)


def _quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """By the tensor's own amax, as the current scaling recipe."""
    scale_inv = (x.detach().abs().max().float() / 448).reshape(1)
    if out is None:
        out = quantizer.make_empty(list(x.shape), dtype=x.dtype, device=x.device)
    out._data.copy_((x.detach().float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8))
    out._scale_inv.copy_(scale_inv)
    out._reset_caches()
    if quantizer.columnwise_usage:
        out._create_transpose()
    return out


def _package(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return module


def _weight(quantized: Any, drawn: Tensor) -> nn.Parameter:
    """As Transformer Engine's modules make it where they are to keep what was drawn."""
    weight: Any = nn.Parameter(quantized)
    setattr(weight, _DRAWN, drawn.clone())
    weight.get_high_precision_init_val = MethodType(lambda self: getattr(self, _DRAWN, None), weight)
    weight.clear_high_precision_init_val = MethodType(lambda self: delattr(self, _DRAWN), weight)
    return weight


@contextmanager
def engine() -> Iterator[SimpleNamespace]:
    """What Megatron takes from Transformer Engine for FP8 weights, on a GPU that reads transposes (Hopper); inside the
    block its modules are imported, afterwards they are as before."""
    compiled: Any = mock.MagicMock(name=_COMPILED)
    compiled.DType, compiled.dequantize, compiled.quantize = DType, _dequantize, _quantize
    compiled.fp8_transpose = _transpose
    debug: Any = ModuleType(_DEBUG)
    debug.DebugQuantizedTensor, debug.DebugQuantizer = (type(n, (), {}) for n in ("DebugQuantizedTensor", "Debugger"))
    before = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    packages = {f"transformer_engine{name}": _package(f"transformer_engine{name}") for name in _PACKAGES}
    try:
        sys.modules.update({_COMPILED: compiled, _DEBUG: debug, **packages})
        tensor = importlib.import_module("transformer_engine.pytorch.tensor")
        utils = importlib.import_module("transformer_engine.pytorch.tensor.utils")
        storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.float8_tensor_storage")
        utils.is_non_tn_fp8_gemm_supported = lambda: False  # type: ignore[attr-defined]
        storage.is_non_tn_fp8_gemm_supported = lambda: False  # type: ignore[attr-defined]
        quantizer = tensor.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", rowwise=True, columnwise=True)
        yield SimpleNamespace(
            make=lambda drawn: _weight(quantizer.quantize(drawn), drawn),
            tensor=tensor.QuantizedTensor,
            replace_raw_data=utils.replace_raw_data,
            post_all_gather_processing=utils.post_all_gather_processing,
        )
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(before)
