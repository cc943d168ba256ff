"""ParamState: one parameter of Fp8AdamW outside ZeRO, its master, and its state in the dense form of torch's Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.new_masters import CHUNK
from fp8_ds.numerics.scale import amax_of
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS, has_moments
from fp8_ds.optim.core import AdamCore, absorb_flat, dense_flat

BOUND_SUM = "bound_sum"
"""Key of the sum that bounds an update (numerics/predicted.py), float64, in a state whose betas have changed."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "step": ("a count below 2**31", lambda value: 0 <= value < 2**31 and value.is_integer()),  # as rounding noise needs
    "scale_inv": ("a power of two", lambda value: math.frexp(value)[0] == 0.5),
    BOUND_SUM: ("a finite number >= 0", lambda value: 0 <= value < math.inf),
}
"""Entries of one element, and what is expected of each."""
_REMEDY = "Load what was saved for the same parameters, in the same order."


class ParamState(MutableMapping[str, Any]):
    """A parameter and its shard, outside ZeRO; as a mapping, its state in the dense form that torch's Adam has.

    An item is decoded when it is read, into a tensor of its own, and quantised when it is set. A master outside the
    parameter's own memory is a copy of it (of bf16 in float32, or of other strides): it follows what others write to
    the parameter, and the parameter follows each step.

    Args:
        param: float32 or bf16; an Fp8Parameter where its master is FP8.
    """

    def __init__(self, core: AdamCore, row: int, param: Tensor) -> None:
        self._core = core
        self._row = row
        self.param = param
        self._made = param.shape, param.dtype, param.device

    @property
    def shard(self) -> AdamShard:
        return self._core.flats[self._row].shards[0]

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter's memory is the master, or its high part."""
        shard, p = self.shard, self.param
        if shard.fmt.is_fp8:
            return True
        return p.dtype == shard.hi.dtype and p.is_contiguous() and p.data_ptr() == shard.hi.data_ptr()

    def __iter__(self) -> Iterator[str]:
        own = ("master",) if self.shard.lo is not None or not self.is_in_place else ()
        moved = () if self._core.sums.get(self._row) is None else (BOUND_SUM,)
        return iter(("step", *MOMENTS, *own, *(("scale_inv",) if self.shard.fmt.is_fp8 else ()), *moved))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: str) -> Tensor:
        if key not in tuple(self):
            raise KeyError(key)
        core, shard, shape = self._core, self.shard, self.param.shape
        if key == "step":
            return core.step_count[self._row].cpu().float()
        if key == "scale_inv":
            return core.scales.scale_inv[shard.scale_index].clone()
        if key == BOUND_SUM:
            bound_sum = core.sums.get(self._row)
            assert bound_sum is not None
            return bound_sum.cpu().clone()
        if key != "master" and not has_moments(shard):
            return torch.zeros(shape, dtype=torch.float32, device=core.device)
        self.follow()
        name = None if key == "master" else key
        return dense_flat(core.flats[self._row], name, core.scales.scale_inv, core.device).view(shape)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in tuple(self):
            raise UnsupportedError(f"state: expected one of {list(self)}, got {key!r}. Keep other values elsewhere.")
        value = torch.as_tensor(value)
        _check_entry(self.shard.name, self.param.shape, key, value)
        entries = {key: value}
        if self.shard.fmt.is_fp8 and key in ("master", "scale_inv"):
            entries = {"master": self["master"], "scale_inv": self["scale_inv"], **entries}
        self.follow()
        self.load(entries)

    def __delitem__(self, key: str) -> None:
        raise UnsupportedError(
            f"state: expected {key!r} to stay, got its removal. Remove the parameter's whole entry to start it anew."
        )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    @torch.no_grad()
    def follow(self) -> None:
        """Update the master to the parameter's new data (`p.data = `, `module.to`) or new values.

        Low parts stay: they are less than half a step of bf16.

        Raises:
            UnsupportedError: the parameter has another shape, dtype or device than at construction.
        """
        shard, p = self.shard, self.param
        if shard.fmt.is_fp8:
            return  # it refuses data of another shape itself
        if (p.shape, p.dtype, p.device) != self._made:
            shape, dtype, device = self._made
            raise UnsupportedError(
                f"{shard.name}: expected {list(shape)} of {dtype} on {device} as the optimizer was made for, got "
                f"{type(p).__name__} {list(p.shape)} of {p.dtype} on {p.device}. Change the model first, then make the "
                "optimizer, and load its state_dict."
            )
        if self.is_in_place:
            return
        values = p.detach().contiguous().view(-1)
        is_of_its_dtype = p.dtype == shard.hi.dtype
        memory, hi_memory = p.untyped_storage().data_ptr(), shard.hi.untyped_storage().data_ptr()
        if is_of_its_dtype and (p.is_contiguous() or memory == hi_memory):
            shard.hi = values
            self._core.moved()
        elif is_of_its_dtype:
            shard.hi.copy_(values)
        else:
            for master, value in zip(shard.hi.split(CHUNK), values.split(CHUNK), strict=True):
                master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the master to the parameter, unless they share memory."""
        if not self.is_in_place:
            self.param.copy_(self.shard.hi.view(self.param.shape))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state from `checked_state`."""
        absorb_state(self._core, self._row, state)
        if "master" in state:
            self.write_back()


def checked_state(name: str, shape: torch.Size, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries that a parameter of this shape takes from a state; ignore others.

    Raises:
        ValueError: an entry is missing, or has another shape or impossible values.
        UnsupportedError: an entry is a DTensor.
    """
    if any(key not in state for key in ("step", *MOMENTS)):
        raise ValueError(
            f"state_dict: expected step, exp_avg and exp_avg_sq of {name}, got {list(state)}. Load a state of AdamW or "
            "Adam."
        )
    found = {key: torch.as_tensor(state[key]) for key in (*_NUMBERS, *MOMENTS, "master") if key in state}
    for key, value in found.items():
        _check_entry(name, shape, key, value)
    return found


def _check_entry(name: str, shape: torch.Size, key: str, value: Tensor) -> None:
    if isinstance(value, DTensor):
        raise UnsupportedError(
            f"state_dict: expected {key} of {name} as a plain tensor, got a DTensor. Load by "
            "torch.distributed.checkpoint, or gather it first (StateDictOptions(full_state_dict=True))."
        )
    is_number = key in _NUMBERS
    if value.numel() != 1 if is_number else value.shape != shape:
        expected = "one element" if is_number else f"shape {list(shape)}"
        raise ValueError(f"state_dict: expected {key} of {name} with {expected}, got {list(value.shape)}. {_REMEDY}")
    if key != "step" and value.dtype not in _DTYPES:
        raise ValueError(f"state_dict: expected {key} of {name} as floating numbers, got {value.dtype}. {_REMEDY}")
    if is_number:
        expected, is_possible = _NUMBERS[key]
        found, is_sound = str(float(value)), is_possible(float(value))
    else:
        is_square, value = key == "exp_avg_sq", value.detach().float()
        expected, found = "finite in float32 and >= 0" if is_square else "finite in float32", "others"
        is_sound = bool((value.isfinite() & (value >= (0.0 if is_square else -math.inf))).all())
    if not is_sound:
        raise ValueError(f"state_dict: expected {key} of {name} to be {expected}, got {found}. Load a sound state.")


def absorb_state(core: AdamCore, row: int, state: Mapping[str, Any]) -> None:
    """Quantise the entries that `state` has into the shards of row `row`.

    Without a bound sum, both moments count as those of steps with the betas that `core` follows.
    """
    flat = core.flats[row]
    if "master" in state:
        shard, scales = flat.shards[0], core.scales
        if shard.fmt.is_fp8:  # the scale is that it was saved with; the smallest that fits where none was saved
            scales.wait()
            amax, scale_inv = scales.amax.clone(), scales.scale_inv.clone()
            amax[shard.scale_index] = amax_of(state["master"])
            scale_inv[shard.scale_index] = state.get("scale_inv", 0.0)
            scales.set(amax, scale_inv)
        absorb_flat(flat, None, state["master"].reshape(-1), core.scales.scale_inv)
    moments = [key for key in MOMENTS if key in state]
    if moments:
        core.allocate()
    for key in moments:
        absorb_flat(flat, key, state[key].reshape(-1), core.scales.scale_inv)
    if BOUND_SUM in state or len(moments) == len(MOMENTS):
        core.sums.set(row, float(state[BOUND_SUM]) if BOUND_SUM in state else None)
    if "step" in state:
        core.step_count[row] = int(state["step"])
