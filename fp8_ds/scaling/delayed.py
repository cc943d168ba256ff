"""Delayed scaling: the scale of this step comes from the amaxes of the last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.numerics.scale import MAX_SCALE, AmaxSlot, scale_vector
from fp8_ds.ops._register import in_own_storage
from fp8_ds.scaling.scale_check import ScaleCheck

_STATE = ("amax_history", "scale", "scale_inv", "amax_local")


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
        self.is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "check": None, "is_copy": True}

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
