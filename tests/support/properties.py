"""Claims about anything that hypothesis can draw, and rigorous bounds for what FP8 may round.

The bounds are not measured: a rounding to FP8 is off by at most half a unit in the last place, or half the smallest
subnormal; with a scale of the past also by what lies beyond the largest number. An FP8 product differs by what these
come to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, E5M2, Float8Format


def settled(num: int) -> settings:
    """Of tests by hypothesis: `num` values, the same in every default run and others in each slow one, however slow the
    machine is that draws them."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(
        max_examples=num, deadline=None, derandomize=num < 1000, database=None, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def check(num: int, strategy: st.SearchStrategy[Any], claim: Callable[[Any], object]) -> None:
    """`claim` holds for `num` values of `strategy`, by `settled`."""

    def holds(value: Any) -> None:
        claim(value)

    settled(num)(given(strategy)(holds))()


class Unit(NamedTuple):
    """How far a rounding to FP8 may be off: relative to an element, and beside that relative to the tensor's amax.

    `relative` is half a unit in the last place of 4 or 3 bits. `floor` is half the smallest subnormal over the largest
    number, twice: block scales are powers of two, so the amax may lie as low as half the largest number.
    """

    relative: float
    floor: float


UNITS = {fmt.name: Unit(2.0**-bits, fmt.smallest_subnormal / fmt.max) for fmt, bits in ((E4M3, 4), (E5M2, 3))}


def rounding_error(x: Tensor, fmt: Float8Format, scale_inv: float | None = None) -> Tensor:
    """By how much each element's rounding may be off, float64, the shape of x (finite).

    Args:
        scale_inv: of the tensor, whatever x is: what is larger than it can hold saturates. None: of x itself, of its
            rows or its blocks.
    """
    x = x.double().abs()
    relative, floor = UNITS[fmt.name]
    if scale_inv is None:
        return relative * x + floor * (x.amax() if x.numel() else 0)
    return relative * x + fmt.smallest_subnormal / 2 * scale_inv + (x - fmt.max * scale_inv).clamp(min=0)


def product_and_bound(a: Tensor, b: Tensor, errors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """a @ b.T in float64, and by how much a product of operands with these `errors` may differ from it."""
    a, b = a.double(), b.double()
    error_a, error_b = errors
    bound = error_a @ b.abs().T + a.abs() @ error_b.T + error_a @ error_b.T
    return a @ b.T, bound


def break_one(x: Tensor, value: float, place: int) -> Tensor:
    """`x` with `value` as one of its elements, if it has any."""
    x = x.clone()
    if x.numel():
        x.view(-1)[place % x.numel()] = value
    return x


def finite_part(x: Tensor) -> Tensor:
    """`x` in float64 with zeros for what is not finite."""
    return x.double().nan_to_num(0.0, 0.0, 0.0)


def assert_right_or_seen(got: Tensor, exact: Tensor, allowed: Tensor, what: object) -> None:
    """What an infinite or NaN input has a part in is not finite; what is finite is right.

    Args:
        got: results.
        exact: float64, NaN or infinite wherever such an input has a part.
        allowed: by how much a finite result may differ.
        what: for the message.
    """
    shows = ~got.isfinite()
    assert bool((shows | exact.isfinite()).all()), (what, "hidden")
    wrong = ~shows & ((got.double() - exact).abs() > allowed)
    assert not bool(wrong.any()), (what, (got.double() - exact)[wrong].abs().max())
