"""Parts of FP8's rounding, one at a time, in models that compute in bf16: which of them costs how much loss?

A cast here goes to FP8 and back, so that operands are FP8 numbers in bf16. Scales are powers of two, one a tensor: bf16
holds these numbers exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rounding = Literal["nearest", "stochastic", "dithered", "moving"]
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}
_BITS = 24
"""Of a threshold."""
_GOLDEN = round(0.6180339887498949 * 2**_BITS)


@dataclass(frozen=True)
class Cast:
    """To a format, and how.

    Attributes:
        rounding: "nearest"; "stochastic", up or down by chance, anew each time; "dithered", of weights only: each
            element's threshold goes around by the golden ratio from step to step, so that the mean over a few steps is
            nearer to the number than chance has it; "moving", of weights only: to nearest, but the tensor's scale goes
            around within an octave in the same way, and with it the places of its elements between FP8 numbers.
    """

    dtype: torch.dtype
    rounding: Rounding = "nearest"


@dataclass(frozen=True)
class Casts:
    """What of a linear is rounded; None: it stays bf16.

    Attributes:
        weight: in all three products, as `input` in both that it is in.
        gradient: of the output.
    """

    weight: Cast | None = None
    input: Cast | None = None
    gradient: Cast | None = None


_E4M3, _E5M2 = Cast(torch.float8_e4m3fn), Cast(torch.float8_e5m2)
_STOCHASTIC, _DITHERED = Cast(torch.float8_e4m3fn, "stochastic"), Cast(torch.float8_e4m3fn, "dithered")
_MOVING = Cast(torch.float8_e4m3fn, "moving")
_E5M2_STOCHASTIC = Cast(torch.float8_e5m2, "stochastic")
EMULATED = {
    "only-weights": Casts(_E4M3, None, None),
    "only-weights-moving": Casts(_MOVING, None, None),
    "emulated": Casts(_E4M3, _E4M3, _E5M2),
    "emulated-moving-e4m3": Casts(_MOVING, _E4M3, _E4M3),
    "only-gradients": Casts(None, None, _E5M2),
    "only-gradients-e4m3": Casts(None, None, _E4M3),
    "only-gradients-stochastic": Casts(None, None, _E5M2_STOCHASTIC),
    "only-weights-dithered": Casts(_DITHERED, None, None),
    "emulated-e4m3": Casts(_E4M3, _E4M3, _E4M3),
    "emulated-moving-stochastic": Casts(_MOVING, _E4M3, _STOCHASTIC),
    "only-weights-stochastic": Casts(_STOCHASTIC, None, None),
    "only-gradients-e4m3-stochastic": Casts(None, None, _STOCHASTIC),
    "only-inputs": Casts(None, _E4M3, None),
    "only-forward": Casts(_E4M3, _E4M3, None),
}
"""By arm, the most wanted first. "emulated" has all that the default recipe rounds, as a check on the others; "-e4m3",
"-moving" and "-stochastic" beside it are what can be done about it."""


def cast(x: Tensor, dtype: torch.dtype, thresholds: Tensor | None = None, octaves: Tensor | None = None) -> Tensor:
    """`x` rounded to FP8 numbers times one power of two, in its own dtype.

    Args:
        thresholds: int32 in [0, 2^24), as `x` in shape: a number goes away from zero where the part of a step that is
            to be dropped and this one together make a step; None: to nearest.
        octaves: by which the scale is smaller, a scalar in [0, 1); the result is rounded to `x`'s dtype then.
    """
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(largest / amax)))
    if octaves is not None:
        scale = scale * torch.exp2(-octaves)
    scaled = x.float() * scale
    if thresholds is not None:
        scaled = _by_threshold(scaled, dtype, thresholds)
    return (scaled.clamp(-largest, largest).to(dtype).float() / scale).to(x.dtype)


def _by_threshold(x: Tensor, dtype: torch.dtype, thresholds: Tensor) -> Tensor:
    """Float32 numbers, each one of the two FP8 neighbours of its own."""
    dropped = 23 - _MANTISSA[dtype]
    added = thresholds >> (_BITS - dropped)
    normal = (x.view(torch.int32) + added).bitwise_and(-(1 << dropped)).view(torch.float32)
    # Below the smallest normal number steps no longer shrink.
    smallest = _SMALLEST_NORMAL[dtype]
    step = smallest * 2.0 ** -_MANTISSA[dtype]
    subnormal = torch.floor(x.abs() / step + thresholds * 2.0**-_BITS) * step * x.sign()
    return torch.where(x.abs() < smallest, subnormal, normal)


def by_chance(x: Tensor) -> Tensor:
    """Thresholds."""
    return torch.randint(0, 1 << _BITS, x.shape, device=x.device, dtype=torch.int32)


class _CastOutput(torch.autograd.Function):
    """Rounds on the way forward; its gradient goes through as it is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, thresholds: Tensor | None = None, octaves: Tensor | None = None
    ) -> Tensor:
        return cast(x, dtype, thresholds, octaves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad, None, None, None


class _CastGradient(torch.autograd.Function):
    """Rounds on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Cast) -> Tensor:
        ctx.how = how
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        how: Cast = ctx.how
        return cast(grad, how.dtype, by_chance(grad) if how.rounding == "stochastic" else None), None


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
        rounding = casts.weight.rounding if casts.weight is not None else "nearest"
        if rounding in ("dithered", "moving"):
            first = by_chance(of.weight if rounding == "dithered" else of.weight[0, 0])
            self.register_buffer("first", first, persistent=False)
            self.register_buffer("step", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        casts, weight = self.casts, self.weight
        if casts.input is not None:
            x = _CastOutput.apply(x, casts.input.dtype)
        if casts.weight is not None:
            weight = _CastOutput.apply(weight, casts.weight.dtype, *self._how(casts.weight.rounding))
        out = F.linear(x, weight)
        return out if casts.gradient is None else _CastGradient.apply(out, casts.gradient)

    def _how(self, rounding: Rounding) -> tuple[Tensor | None, Tensor | None]:
        """Thresholds and octaves of the weight, new ones at each step of training."""
        if rounding == "nearest":
            return None, None
        if rounding == "stochastic":
            return by_chance(self.weight), None
        if self.training:
            self.step += 1
        now = (self.first + self.step * _GOLDEN).bitwise_and((1 << _BITS) - 1)
        return (now, None) if rounding == "dithered" else (None, now * 2.0**-_BITS)


def emulate(blocks: nn.Module, casts: Casts) -> None:
    """Replace every linear in `blocks`, in place."""
    for name, child in blocks.named_children():
        if isinstance(child, nn.Linear):
            setattr(blocks, name, EmulatedLinear(child, casts))
        else:
            emulate(child, casts)
