"""Overshoots: tensors far beyond what the delayed scale in use can hold, counted on the device in every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy

FAR = 4.0
"""Times what a scale can hold, beyond which a step counts. In trainings that go well inputs are up to 1.1 times, and
output gradients, which follow the batch, up to 3 times (benchmarks/results/2026-11-29-guard.md)."""
NUM_STEPS = {"input": 2, "grad_output": 10}
"""Such steps in an interval, from which on a layer does not fit FP8. The scale follows a jump after one step."""
TOO_FAR = 16.0
"""Times what a scale can hold, which once is enough, of inputs."""
NUM_UPDATES_TO_SETTLE = 100
"""Updates of a history before steps count: where weights start at zero, gradients grow by large factors at first."""


class Overshoots:
    """Counts of slots of an AmaxHistory in an interval of steps: steps beyond FAR, and the largest overshoot.

    Counts are of amaxes over all ranks that share the history, so they are equal on these ranks.

    Args:
        names, fp8_max: those of the history; `fp8_max` is float32 [num_slots].
    """

    def __init__(self, names: Sequence[str], fp8_max: Tensor) -> None:
        self._names = tuple(names)
        self._fp8_max = fp8_max
        self._counts = torch.zeros(2, len(self._names), dtype=torch.float32, device=fp8_max.device)
        self._is_counted = torch.ones(len(self._names), dtype=torch.bool, device=fp8_max.device)
        self._host = HostCopy(self._counts)
        self._is_on_its_way = False

    def leave_out(self, layers: Collection[str]) -> None:
        """Count from the next step on all layers but these, which compute in bf16."""
        is_counted = [slot.rpartition(" ")[0] not in layers for slot in self._names]
        self._is_counted.copy_(torch.tensor(is_counted, dtype=torch.bool))

    def count(self, amax: Tensor, scale: Tensor, num_updates: int) -> None:
        """Count a step. A slot whose amax is not finite (a skipped step's) is left out.

        Args:
            amax: float32 [num_slots], over all ranks.
            scale: float32 [num_slots], by which the step was quantised.
            num_updates: of the history, up to this step.
        """
        if num_updates < NUM_UPDATES_TO_SETTLE:
            return
        beyond = amax * scale / self._fp8_max
        beyond = torch.where(self._is_counted & (beyond < torch.inf), beyond, 0.0)
        self._counts[0] += beyond > FAR
        torch.maximum(self._counts[1], beyond, out=self._counts[1])

    def send(self) -> None:
        """Start the interval's counts on their way to the host, and begin another. Never waits."""
        self._host.send(self._counts)
        self._is_on_its_way = True
        self._counts.zero_()

    def problems(self) -> dict[str, str] | None:
        """Return layer -> how far which of its tensors went beyond its scale, of what was sent; None if nothing was.

        Wait for that copy, which is long done a step later.
        """
        if not self._is_on_its_way:
            return None
        self._is_on_its_way = False
        found: dict[str, list[str]] = {}
        for slot, num_steps, largest in zip(self._names, *self._host.read().tolist(), strict=True):
            layer, _, kind = slot.rpartition(" ")
            if num_steps >= NUM_STEPS[kind] or (kind == "input" and largest > TOO_FAR):
                text = f"{kind} up to {largest:.2g} times what its scale holds, {num_steps:g} times beyond {FAR:g}"
                found.setdefault(layer, []).append(text)
        return {layer: ", ".join(texts) for layer, texts in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types: the interval's counts, and what was sent and not asked for; waits for both."""
        waiting = self._host.read().tolist() if self._is_on_its_way else None
        return {"names": list(self._names), "counts": self._counts.tolist(), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; nothing has been counted if it is None or of other slots."""
        self._is_on_its_way = False
        self._counts.zero_()
        if state is None or tuple(state["names"]) != self._names:
            return
        counts, waiting = tables_of(state)
        self._counts.copy_(counts)
        if waiting is not None:
            self._host.send(waiting)
            self._is_on_its_way = True


def tables_of(state: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the counts of a state, and those that were sent: float32 [2, num_slots].

    Raises:
        ValueError: they are not what a save writes.
    """
    shape = (2, len(state["names"]))

    def table(rows: Any) -> Tensor:
        found = torch.zeros((), dtype=torch.float32) if rows is None else torch.tensor(rows, dtype=torch.float32)
        if found.shape != shape or not bool(((found >= 0) & (found < torch.inf)).all()):
            raise ValueError(f"expected counts of shape {shape}, finite and not negative, got {rows!r:.80}")
        return found

    return table(state["counts"]), None if state["waiting"] is None else table(state["waiting"])
