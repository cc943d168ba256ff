"""Transformer Engine's module classes as far as checkpoints go: parameters, their names, `_extra_state`; no GEMM.

With it Megatron's own TE layers (megatron/core/extensions/transformer_engine.py) are built, and their own
`sharded_state_dict` runs, on a machine without Transformer Engine. Parameters are named, and cut, as in
transformer_engine/pytorch/module/{linear,layernorm_linear}.py of 2.8: read, not copied.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

NAME = "transformer_engine"


class _Module(nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        """Empty without delayed scaling, and always there."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        bias: bool = True,
        init_method: Any = None,
        params_dtype: torch.dtype = torch.float32,
        **others: Any,
    ) -> None:
        super().__init__()
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        cols = in_features // (tp_size if parallel_mode == "row" else 1)
        self.in_features, self.out_features, self.tp_size, self.use_bias = cols, rows, tp_size, bias
        self.weight = nn.Parameter(torch.empty(rows, cols, dtype=params_dtype))
        nn.init.normal_(self.weight)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=params_dtype))


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", **others: Any) -> None:
        super().__init__(in_features, out_features, **others)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        if normalization != "RMSNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))


class RMSNorm(_Module):
    def __init__(self, hidden_size: int, **others: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size: int, **others: Any) -> None:
        super().__init__(hidden_size)
        self.bias = nn.Parameter(torch.zeros(hidden_size))


class DotProductAttention(_Module):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__()


def get_cpu_offload_context(*args: Any, **others: Any) -> tuple[Any, Any]:
    return nullcontext(), lambda *tensors: None


_CLASSES = {one.__name__: one for one in (Linear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention)}


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == f"{NAME}.pytorch" and name in _CLASSES:
            return _CLASSES[name]
        value: Any = MagicMock()
        if name == "get_cpu_offload_context":
            value = get_cpu_offload_context
        elif name.endswith("Tensor"):
            value = type(name, (), {})  # Megatron asks whether tensors are of it
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = _Anything(spec.name)
        found.__version__ = "2.8.0"  # type: ignore[attr-defined]
        return found

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """From now on `import transformer_engine` finds this; before Megatron is imported."""
    sys.meta_path.insert(0, _Finder())
