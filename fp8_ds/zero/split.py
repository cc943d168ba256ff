"""Common parts of both ZeRO mix-ins with split masters: scales instead of a quantiser, flat tensors of no size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.logged import max_reduce
from fp8_ds.numerics.masters import MasterFormat, encode
from fp8_ds.optim.states import CHUNK
from fp8_ds.scaling.granularity import TENSOR
from fp8_ds.scaling.predicted import PredictedScales


def virtual_flat(numel: int, device: torch.device | str) -> Tensor:
    """Make a float32 leaf of `numel` elements in the memory of one, in the place of DeepSpeed's flat masters.

    Reading it gives NaN; writing it raises, as into any expanded tensor.
    """
    return torch.full((1,), float("nan"), dtype=torch.float32, device=device).expand(numel).requires_grad_()


class SplitQuantizer:
    """Replacement of `WeightQuantizer` where the masters, in `fmt`, contain the FP8 bytes."""

    def __init__(self, scales: PredictedScales, fmt: MasterFormat) -> None:
        self.scales = scales
        self.fmt = fmt

    @property
    def group(self) -> Any:
        return self.scales.group

    @property
    def scale(self) -> Tensor:
        return self.scales.scale

    @property
    def scale_inv(self) -> Tensor:
        return self.scales.scale_inv

    @torch.no_grad()
    def amax_of(self, index: int, value: Tensor, start: int = 0) -> Tensor:
        """Return the largest magnitude of `value`, a part of weight `index`: float32, 0-dim."""
        return TENSOR.amax(value, ())

    @torch.no_grad()
    def rescale(self, index: int, amax: Tensor) -> None:
        """Give weight `index` the scale of `amax` (0-dim), the same on all ranks if `amax` is."""
        self.scales.replace(index, amax)

    @torch.no_grad()
    def quantize_into(self, out: Tensor, value: Tensor, index: int, start: int = 0) -> None:
        """Write the high parts of `value` (1-D), wherever in the weight it starts, into `out` (1-D float8)."""
        target = out.view(torch.uint8)
        for source, bytes_ in zip(value.split(CHUNK), target.split(CHUNK), strict=True):
            bytes_.copy_(encode(source.float(), self.fmt, self.scale_inv[index])[0])


def reduced_amaxes(num: int, sources: list[tuple[int, Tensor]], group: dist.ProcessGroup, device: Any) -> Tensor:
    """Return float32 [num]: the largest magnitude of every weight over all ranks. Collective.

    Args:
        sources: (weight, a piece of its values) as this rank holds them, any float dtype and device; pieces of no
            elements are allowed.
    """
    amaxes = torch.zeros(num, dtype=torch.float32, device=device)
    for index, piece in sources:
        if piece.numel():
            amax = torch.linalg.vector_norm(piece, float("inf"), dtype=torch.float32).to(device)
            amaxes[index] = torch.maximum(amaxes[index], amax)
    max_reduce(group, amaxes)
    return amaxes
