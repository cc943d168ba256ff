"""Fp8Payload: the FP8 bytes and scale that sit beside a nominal bf16 Parameter (`p._fp8`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.quantize import quantize
from fp8_ds.scaling.granularity import per_element


class Fp8Payload:
    """One FP8 weight. `p._fp8` is the only attribute this package hangs on a Parameter it does not own.

    Args:
        name: the weight's name in the model, for messages.
        scale: the weight's grid (scaling/granularity.py), float32 on the weight's device, multiplies to enter FP8. Like
            `scale_inv` a view into the ZeRO optimizer's scale vector, which each step changes in place.
        scale_inv: of the same shape and kind, multiplies to leave FP8.
        dtype: nominal dtype of the Parameter (bf16), the dtype that readers get.
        device: where the placeholder lives.

    Attributes:
        data: float8_e4m3fn tensor of the Parameter's full shape, contiguous, or None while the weight is sharded
            (ZeRO-3) or gathered by a stock reader in bf16 (GatheredParameters). Assigning aliases the value in a tensor
            that stays the same: who holds it sees what is assigned later.
        placeholder: one NaN element of `dtype`, which the Parameter's nominal data expands: whatever reads past the
            hooks reads NaN.
        write: called with a hp tensor of full shape when somebody writes into the Parameter (`copy_`, `data = `).
        has_master: whether what is written is kept in more bits somewhere; a frozen weight's is not in ZeRO-1/2.
        export: while set, readers get this tensor instead of de-quantised bytes.
        hp: while the layer computes in bf16 under ZeRO-1/2, its weight: bf16 of the master, full shape.
        version: changes with each step, load and write of ZeRO-1/2; values read before are old then.
    """

    __slots__ = (
        "_bytes",
        "_is_here",
        "_no_bytes",
        "dtype",
        "export",
        "has_master",
        "hp",
        "name",
        "placeholder",
        "scale",
        "scale_inv",
        "version",
        "write",
    )

    def __init__(
        self, name: str, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.name = name
        self.scale = scale
        self.scale_inv = scale_inv
        self.dtype = dtype
        self._bytes = torch.empty(0, dtype=E4M3.torch_dtype, device=device or scale.device)
        self._no_bytes = self._bytes.detach()
        self._is_here = False
        self.placeholder = torch.full((1,), float("nan"), dtype=dtype, device=device or scale.device)
        self.write: Callable[[Tensor], None] | None = None
        self.export: Tensor | None = None
        self.has_master = True
        self.hp: Tensor | None = None
        self.version = 0

    @property
    def data(self) -> Tensor | None:
        return self._bytes if self._is_here else None

    @data.setter
    def data(self, value: Tensor | None) -> None:
        # One tensor object for life, as DeepSpeed does with `param.data`: a compiled forward keeps it for its backward,
        # and must not keep the memory that ZeRO-3 releases in between, nor miss what it gathers then.
        self._is_here = value is not None
        self._bytes.data = self._no_bytes if value is None else value

    def dequantize(self) -> Tensor:
        """Return the gathered weight in its nominal dtype, full shape; a new tensor."""
        if self.hp is not None:
            return self.hp.clone()
        assert self.data is not None, f"{self.name} is not gathered"
        return (self.data.float() * per_element(self.scale_inv, self.data.shape)).to(self.dtype)

    def quantize(self, weight: Tensor) -> Tensor:
        """Quantize `weight` (hp, full shape) by the scales as they are."""
        return quantize(weight, per_element(self.scale, weight.shape), E4M3)

    def nominal(self, shape: torch.Size) -> Tensor:
        """Return NaN of `shape` at the cost of one element."""
        return self.placeholder.expand(shape) if shape else self.placeholder.view(())
