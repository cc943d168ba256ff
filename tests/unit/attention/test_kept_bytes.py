"""benchmarks/attention.py counts what autograd keeps, in wrappers of other libraries too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


class Wrapper(Tensor):
    """As Transformer Engine's Float8Tensor: its data is in attributes, its own storage cannot be read."""

    data_fp8: Tensor
    scale_inv: Tensor

    @staticmethod
    def __new__(cls, data_fp8: Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, data_fp8.shape, dtype=torch.bfloat16)
        wrapper.data_fp8, wrapper.scale_inv = data_fp8, torch.ones(1)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, *args: Any) -> Any:
        raise NotImplementedError(function)

    def get_metadata(self) -> dict[str, Any]:
        return {"data": self.data_fp8, "fp8_scale_inv": self.scale_inv, "data_transpose": None, "quantizer": object()}


class KeepsFp8(torch.autograd.Function):
    """Keeps 100 bytes as two views, two scales and its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        data = torch.zeros(100, dtype=torch.uint8)
        ctx.save_for_backward(Wrapper(data[:60]), Wrapper(data[60:]), x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_bytes_inside_of_wrappers_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    with pytest.raises(RuntimeError, match="data pointer on an invalid python storage"):
        Wrapper(torch.zeros(4, dtype=torch.uint8)).untyped_storage().data_ptr()
    x = torch.zeros(8, requires_grad=True)
    kept = import_module("attention").kept_bytes(lambda: KeepsFp8.apply(x))
    assert kept == 100 + 2 * 4 + 8 * 4
