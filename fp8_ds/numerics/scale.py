"""Scales from amaxes: of the tensor at hand, as a power of two, or of the last steps (delayed scaling)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8_ds.errors import ConfigError

if TYPE_CHECKING:
    from fp8_ds.monitor.overshoot import Overshoots
    from fp8_ds.monitor.scale_check import ScaleCheck

MAX_SCALE = 2.0**126
"""Largest scale given: its reciprocal, 2**-126, is the smallest normal float32, so it survives flush-to-zero units."""


MANTISSA_BITS = 23  # of float32
MANTISSA = (1 << MANTISSA_BITS) - 1


_STATE = ("amax_history", "scale", "scale_inv", "amax_local")


def amax_of(value: Tensor) -> Tensor:
    """Return the largest magnitude of `value` (any float dtype), float32, 0-dim; 0 if there are no elements."""
    if not value.numel():
        return torch.zeros((), dtype=torch.float32, device=value.device)
    value = value.float() if value.dtype == torch.float64 else value  # vector_norm refuses to narrow
    return torch.linalg.vector_norm(value, float("inf"), dtype=torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float | Tensor) -> tuple[Tensor, Tensor]:
    """Map each amax onto `fp8_max`; elementwise, on the device, without a host synchronisation.

    An amax of 0 gives scale 1. A tiny amax gives at most 2**126, never infinity. A non-finite amax gives scale 1 and
    scale_inv NaN, so that whatever is de-quantised with it is NaN: a broken tensor is never hidden by saturation.

    Args:
        amax: largest magnitudes, >= 0, floating, any shape, any device.
        fp8_max: largest finite value of the target format; a number, or float32 on amax's device that broadcasts
            against amax.

    Returns:
        (scale, scale_inv): float32, the shape of amax; multiply by scale to enter FP8, by scale_inv to leave.
    """
    amax = amax.to(torch.float32)
    if not isinstance(fp8_max, Tensor):
        # Not `float / Tensor`: torch computes that as reciprocal times float, which rounds twice and overflows early.
        fp8_max = torch.full_like(amax, fp8_max)
    finite = torch.isfinite(amax)
    quotient = (fp8_max / amax).clamp(max=MAX_SCALE)
    scale = torch.where(finite & (amax > 0), quotient, torch.ones_like(amax))
    scale_inv = torch.where(finite, scale.reciprocal(), torch.full_like(amax, float("nan")))
    return scale, scale_inv


def row_scale_from_amax(amax: Tensor, fp8_max: float | Tensor) -> tuple[Tensor, Tensor]:
    """Map the amax of each row onto `fp8_max`, as `scale_from_amax`, but a row of zeros gets scale 2**126.

    Where a GEMM contracts over rows, their scale_inv is multiplied into the other operand before that is quantised. A
    scale_inv of 1 beside ones of 1e-6 would leave all but the element that meets the row of zeros without a digit.
    """
    amax = amax.to(torch.float32)
    scale, scale_inv = scale_from_amax(amax, fp8_max)
    is_zero = amax == 0
    return scale.masked_fill(is_zero, MAX_SCALE), scale_inv.masked_fill(is_zero, 1 / MAX_SCALE)


def scale_vector(num: int, device: torch.device | str) -> Tensor:
    """Ones, float32 [num], one every 16 bytes: cuBLASLt reads a scale through a pointer that must be so aligned.

    Source: a 0-dim view at another offset gives CUBLAS_STATUS_NOT_SUPPORTED (torch 2.11 + CUDA 13.0, H200).
    """
    return torch.ones(num, 4, dtype=torch.float32, device=device)[:, 0]


def in_own_storage(view: Tensor) -> Tensor:
    """Return the memory of `view` as a tensor that is the whole of its storage: offset 0, no base, its own version.

    Arguments that an op writes must be such tensors (`register` checks it while a graph is traced). If two of them are
    views of one storage, inductor writes the first in place and hands the op a clone of the second. Up to torch 2.12
    that clone is read at twice the view's storage offset: memory of another tensor. Later versions clone the right
    bytes, but still everything in front of the view as well, at every call.

    Args:
        view: contiguous, any dtype and device. Without memory ("meta") it is returned as it is.

    Source: pytorch/pytorch, torch/_inductor/lowering.py `as_strided` (2.13 subtracts the offset of a graph's input);
    docs/troubleshooting.md has the smallest program that shows it.
    """
    if view.is_meta:
        return view
    first = view.storage_offset() * view.element_size()
    memory = view.untyped_storage()[first : first + view.numel() * view.element_size()]
    whole: Tensor = torch.empty(0, dtype=view.dtype, device=view.device).set_(memory, 0, view.shape)  # type: ignore[call-overload]
    return whole


@dataclass(frozen=True)
class AmaxSlot:
    """One tensor's entries of an AmaxHistory: 0-dim float32 tensors in its memory, each the whole of its own storage.

    With a shared version counter, one linear recording its amax would invalidate what another has kept for backward.
    With a shared storage, torch.compile takes two amaxes that one op writes for overlapping tensors.
    From `origin`, the history and the index in it, copies and pickles take their views, which plain pickle would copy.
    """

    amax_local: Tensor
    scale: Tensor
    scale_inv: Tensor
    origin: tuple[Any, int] | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.origin is None else (type(self.origin[0]).slot, self.origin)


def exponent_rule(fp8_max: float) -> tuple[int, int]:
    """Return (carry, shift): with `carry` added to an amax's bits, the biased exponent less `shift` is scale_inv's."""
    mantissa, exponent = math.frexp(fp8_max)  # in [0.5, 1): one bit more than the stored fraction
    largest_fraction = int((2 * mantissa - 1) * (1 << MANTISSA_BITS))
    return MANTISSA - largest_fraction, exponent - 1


def pow2_scale(amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Return the largest power of two, at most 2**126, that takes each amax to `fp8_max` or below, and its inverse.

    An amax of 0 gives scale_inv 2**-126 and not 1, so that zeros never set the largest scale of a matrix. A non-finite
    amax gives scale_inv NaN, and the scale of an amax of 1.

    Returns:
        (scale, scale_inv): float32, the shape of amax (float32, >= 0); multiply to enter FP8, and to leave it.
    """
    carry, shift = exponent_rule(fp8_max)
    finite = amax.isfinite()
    bits = torch.where(finite, amax, 1.0).view(torch.int32)
    biased = (((bits + carry) >> MANTISSA_BITS) - shift).clamp(min=1)
    scale = ((254 - biased) << MANTISSA_BITS).view(torch.float32)
    scale_inv = (biased << MANTISSA_BITS).view(torch.float32)
    return scale, torch.where(finite, scale_inv, float("nan"))


class AmaxHistory:
    """Amaxes of the last optimizer steps for many tensors (slots), and the scales that follow from them.

    Between two updates the linears raise `amax_local`; `update` takes the vector after its MAX all-reduce, so
    histories and scales are equal on all ranks. Until the first update (`ready` is False) there is no scale to use and
    the linears scale by the tensor at hand. `amax_local`, `scale` and `scale_inv` keep their storage for life, so
    views of them stay good.

    Args:
        num_slots: number of tensors watched.
        fp8_max: largest finite value of each slot's format.
        history_len: steps remembered. 16 instead of Transformer Engine's 1024: a scale that is too small for 1024
            steps after one outlier costs more than the rare saturation that a short window risks.
        device: device of the vectors, which is the linears'.
        names: names of the slots, for the log.

    Attributes:
        check: check of the scales in use, on one rank of those that share this history; None in copies and pickles.
        overshoots: counts of amaxes beyond what these scales can hold, on all ranks, for the guard; None as `check`.
        is_copy: whether this is a copy or from a pickle, and has not been updated since.
        amax_local: float32 [num_slots], maximum since the last update on this rank.
        scale, scale_inv: float32 [num_slots], multiply to enter FP8, and to leave.
        amax_history: float32 [history_len, num_slots], a ring, only finite values.
        num_updates: updates so far, host integer.
        ready: `num_updates > 0`, its own attribute so that a compiled graph guards on it and not on the counter.
    """

    def __init__(
        self,
        num_slots: int,
        fp8_max: Sequence[float],
        history_len: int = 16,
        device: torch.device | str = "cpu",
        names: Sequence[str] = (),
    ) -> None:
        if len(fp8_max) != num_slots:
            raise ConfigError(f"fp8_max: expected {num_slots} values, one per slot, got {len(fp8_max)}. Give one each.")
        if history_len < 1:
            raise ConfigError(f"history_len: expected at least 1, got {history_len}. Use 16, the default.")
        self.num_slots = num_slots
        self.history_len = history_len
        self.fp8_max = torch.tensor(fp8_max, dtype=torch.float32, device=device)
        # Each amax where inductor takes it for aligned: what a graph writes elsewhere keeps it from being a CUDA graph.
        self.amax_local = scale_vector(num_slots, device).zero_()
        self.scale = scale_vector(num_slots, device)
        self.scale_inv = scale_vector(num_slots, device)
        self.amax_history = torch.zeros(history_len, num_slots, dtype=torch.float32, device=device)
        self.num_updates = 0
        self.ready = False
        self.names = tuple(names) or tuple(f"slot {index}" for index in range(num_slots))
        self.check: ScaleCheck | None = None
        self.overshoots: Overshoots | None = None
        self.is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "check": None, "overshoots": None, "is_copy": True}

    def move(self, device: torch.device) -> None:
        """Move to the device where a copy's layers are now; each layer takes its slots anew."""
        for name in ("amax_local", "scale", "scale_inv"):
            setattr(self, name, scale_vector(self.num_slots, device).copy_(getattr(self, name)))
        self.fp8_max, self.amax_history = self.fp8_max.to(device), self.amax_history.to(device)

    def slot(self, index: int) -> AmaxSlot:
        """Return the entries of tensor `index`; they are good for the life of this object."""
        vectors = self.amax_local, self.scale, self.scale_inv
        return AmaxSlot(*(in_own_storage(vector[index]) for vector in vectors), origin=(self, index))

    @torch.no_grad()
    def update(self, amax_global: Tensor) -> None:
        """Finish one optimizer step: the scales follow the newest amaxes, and `amax_local` is zero again.

        A slot whose amax is not finite keeps its scale: its history is reset to the last finite maximum, so neither
        the NaN nor the outliers before it linger. One that was not used, or saw only zeros, for a whole history keeps
        the scale it had: with 1 the gradients of a layer that comes back would all underflow once.
        Source: the latter, NVIDIA/TransformerEngine `compute_scaling_factor`.

        Args:
            amax_global: float32 [num_slots], maximum over all ranks, on this object's device.
        """
        if amax_global.shape != self.amax_local.shape:
            raise ValueError(
                f"amax_global: expected shape {tuple(self.amax_local.shape)}, got {tuple(amax_global.shape)}. "
                "Pass one value per slot."
            )
        if self.check is not None and self.ready:
            self.check.after_step(amax_global, self.scale)
        if self.overshoots is not None and self.ready:
            self.overshoots.count(amax_global, self.scale, self.num_updates)
        last_maximum = self.amax_history.amax(dim=0)
        finite = amax_global < torch.inf
        self.amax_history.mul_(finite)
        self.amax_history[self.num_updates % self.history_len] = torch.where(finite, amax_global, last_maximum)
        # `scale_from_amax` of what is finite: fewer operators, each of which the device waits for.
        amax = self.amax_history.amax(dim=0)
        self.scale.copy_(torch.where(amax > 0, (self.fp8_max / amax).clamp(max=MAX_SCALE), self.scale))
        torch.reciprocal(self.scale, out=self.scale_inv)
        self.amax_local.zero_()
        self.num_updates += 1
        self.ready = True
        self.is_copy = False

    @torch.no_grad()
    def forget(self) -> None:
        """Reset to the state before the first update, in the same storage."""
        self.amax_history.zero_()
        self.amax_local.zero_()
        self.scale.fill_(1.0)
        self.scale_inv.fill_(1.0)
        self.num_updates = 0
        self.ready = False
        if self.check is not None:
            self.check.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and integers, readable by `torch.load(weights_only=True)`, that resume bit for bit."""
        vectors = {name: getattr(self, name).detach().clone() for name in _STATE}
        return vectors | {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in this object's own storage.

        Raises:
            ConfigError: the state has another number of slots or another history length; nothing is changed then.
        """
        for name in _STATE:
            expected, got = tuple(getattr(self, name).shape), tuple(state[name].shape)
            if expected != got:
                raise ConfigError(
                    f"amax history: expected {name} of shape {expected}, got {got}. "
                    "The checkpoint is of another layer plan; load it with the plan it was saved with."
                )
        for name in _STATE:
            getattr(self, name).copy_(state[name])
        self.num_updates = int(state["num_updates"])
        self.ready = self.num_updates > 0
        if self.check is not None:
            self.check.restart()
