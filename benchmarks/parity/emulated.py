"""Parts of FP8's rounding, one at a time, in models that compute in bf16: which of them costs how much loss?

A cast here goes to FP8 and back, so that operands are FP8 numbers in bf16. Scales are powers of two, one a tensor: bf16
holds these numbers exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


@dataclass(frozen=True)
class Casts:
    """What of a linear is rounded, to which format; None: it stays bf16.

    Attributes:
        weight: in all three products, as `input` in both that it is in.
        gradient: of the output.
        stochastic: weights and gradients are rounded up or down by chance, anew each time; inputs to nearest.
    """

    weight: torch.dtype | None = None
    input: torch.dtype | None = None
    gradient: torch.dtype | None = None
    stochastic: bool = False


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EMULATED = {
    "emulated": Casts(_E4M3, _E4M3, _E5M2),
    "only-forward": Casts(_E4M3, _E4M3, None),
    "only-gradients": Casts(None, None, _E5M2),
    "only-weights": Casts(_E4M3, None, None),
    "only-inputs": Casts(None, _E4M3, None),
    "only-gradients-e4m3": Casts(None, None, _E4M3),
    "only-weights-stochastic": Casts(_E4M3, None, None, stochastic=True),
    "only-gradients-stochastic": Casts(None, None, _E5M2, stochastic=True),
}
"""By arm. "emulated" has all that the default recipe rounds, as a check on the others."""


def cast(x: Tensor, dtype: torch.dtype, stochastic: bool = False) -> Tensor:
    """`x` rounded to FP8 numbers times one power of two, in its own dtype."""
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(largest / amax)))
    scaled = x.float() * scale
    if stochastic:
        scaled = _by_chance(scaled, dtype)
    return (scaled.clamp(-largest, largest).to(dtype).float() / scale).to(x.dtype)


def _by_chance(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers, each one of the two FP8 neighbours of its own; the mean of many is that number."""
    dropped = 23 - _MANTISSA[dtype]
    chance = torch.randint(0, 1 << dropped, x.shape, device=x.device, dtype=torch.int32)
    normal = (x.view(torch.int32) + chance).bitwise_and(-(1 << dropped)).view(torch.float32)
    # Below the smallest normal number steps no longer shrink.
    smallest = _SMALLEST_NORMAL[dtype]
    step = smallest * 2.0 ** -_MANTISSA[dtype]
    subnormal = torch.floor(x / step + torch.rand_like(x)) * step
    return torch.where(x.abs() < smallest, subnormal, normal)


class _CastOutput(torch.autograd.Function):
    """Rounds on the way forward; its gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor:
        return cast(x, dtype, stochastic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


class _CastGradient(torch.autograd.Function):
    """Rounds on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor:
        ctx.how = dtype, stochastic
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return cast(grad, *ctx.how), None, None


class EmulatedLinear(nn.Linear):
    """A linear whose operands have passed through FP8.

    Args:
        of: its weight becomes this one's; it has no bias.
    """

    def __init__(self, of: nn.Linear, casts: Casts) -> None:
        assert of.bias is None
        super().__init__(of.in_features, of.out_features, bias=False, device="meta")
        self.weight = of.weight
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        casts, weight = self.casts, self.weight
        if casts.input is not None:
            x = _CastOutput.apply(x, casts.input, False)
        if casts.weight is not None:
            weight = _CastOutput.apply(weight, casts.weight, casts.stochastic)
        out = F.linear(x, weight)
        return out if casts.gradient is None else _CastGradient.apply(out, casts.gradient, casts.stochastic)


def emulate(blocks: nn.Module, casts: Casts) -> None:
    """Replace every linear in `blocks`, in place."""
    for name, child in blocks.named_children():
        if isinstance(child, nn.Linear):
            setattr(blocks, name, EmulatedLinear(child, casts))
        else:
            emulate(child, casts)
