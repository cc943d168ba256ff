"""Transformer Engine's module classes as far as checkpoints and a trial on a CPU go: parameters, their names,
`_extra_state`, and plain products without FP8.

With it Megatron's own TE layers (megatron/core/extensions/transformer_engine.py) are built and trained, on one rank of
a tensor-parallel group, and their own `sharded_state_dict` runs, on a machine without Transformer Engine. Parameters
are named, and cut, as in transformer_engine/pytorch/module/{linear,layernorm_linear}.py of 2.8: read, not copied.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "transformer_engine"
CALLS = Counter[str]()
"""Forwards by class."""


class _Module(nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        """Empty without delayed scaling, and always there."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Linear(_Module):
    save_original_input = False

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

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        CALLS[type(self).__name__] += 1
        return F.linear(x, self.weight)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", eps: float = 1e-5, **others: Any
    ) -> None:
        super().__init__(in_features, out_features, **others)
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, False
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        if normalization != "RMSNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        weight = self.layer_norm_weight.to(x.dtype)
        if self.normalization == "RMSNorm":
            return super().forward(F.rms_norm(x, x.shape[-1:], weight, self.eps))
        return super().forward(F.layer_norm(x, x.shape[-1:], weight, self.layer_norm_bias.to(x.dtype), self.eps))


class RMSNorm(_Module):
    def __init__(self, hidden_size: int = 0, *, normalized_shape: int = 0, eps: float = 1e-5, **others: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size or normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size: int = 0, **others: Any) -> None:
        super().__init__(hidden_size, **others)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class DotProductAttention(_Module):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **others: Any) -> Tensor:
        """Causal; [s, b, h, d]."""
        CALLS["DotProductAttention"] += 1
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def get_cpu_offload_context(*args: Any, **others: Any) -> tuple[Any, Any]:
    return nullcontext(), lambda *tensors: None


_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "CustomRecipe")
_WITHOUT = (f"{NAME}.pytorch.optimizers",)
"""Megatron takes its own Adam where these are missing."""
_CLASSES = {one.__name__: one for one in (Linear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention)}


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == f"{NAME}.pytorch" and name in _CLASSES:
            return _CLASSES[name]
        value: Any = MagicMock()
        if f"{self.__name__}.{name}" in (f"{NAME}.common", f"{NAME}.common.recipe"):
            value = importlib.import_module(f"{self.__name__}.{name}")
        elif name in _RECIPES:
            value = type(name, (), {"__init__": lambda self, *args, **kwargs: vars(self).update(kwargs)})
        elif name == "get_cpu_offload_context":
            value = get_cpu_offload_context
        elif name.endswith("Tensor"):
            value = type(name, (), {})  # Megatron asks whether tensors are of it
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_ours = fullname.split(".")[0] == NAME and fullname not in _WITHOUT
        return ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = _Anything(spec.name)
        found.__version__ = "2.8.0"  # type: ignore[attr-defined]
        return found

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """From now on `import transformer_engine` finds this; before Megatron is imported."""
    sys.meta_path.insert(0, _Finder())
