"""Check that names, in the log, tensors whose delayed scale has not fitted them for some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy

NUM_STEPS = 3
_SMALLEST = 1 / 16
"""Limit of `amax * scale`: a scale that follows 16 steps is this far off only after a fall by thousands."""
_LARGEST = 16
"""Limit of `amax * scale / fp8_max`."""
_NUM_SHOWN = 4


class ScaleCheck:
    """Check that names each slot of an AmaxHistory, once, that underflows or saturates for `NUM_STEPS` steps running.

    A slot underflows if its amax times the scale in use is below 1/16, and saturates if that is above 16 times
    `fp8_max`. A step whose amax is 0 (an idle expert) or not finite (a skipped step) is left out: it neither counts nor
    ends a run. Checkpoints keep no runs: they begin anew after a load.

    The device multiplies two vectors and copies the product, which the host judges when the next step ends. It never
    waits: while a copy is still on its way, steps are left out.

    `names`, `amax_local` and `fp8_max` are those of the history; `say` is called with a line that names what was found.
    """

    def __init__(self, names: Sequence[str], amax_local: Tensor, fp8_max: Tensor, say: Callable[[str], None]) -> None:
        self._names = tuple(names)
        self._fp8_max: NDArray[np.float32] = fp8_max.cpu().numpy()
        self._say = say
        self._host = HostCopy(amax_local)
        self._named = np.zeros(len(self._names), dtype=bool)
        self.restart()

    def restart(self) -> None:
        """Start anew: amaxes and scales have changed, and earlier findings say nothing of them."""
        self._is_sent = False
        self._runs = np.zeros(len(self._names), dtype=np.int64)

    def after_step(self, amax: Tensor, scale: Tensor) -> None:
        """Send a step's amaxes over all ranks times its scales to the host, and judge the step before it."""
        if self._is_sent:
            scaled = self._host.read_if_arrived()
            if scaled is None:
                return
            self._judge(scaled.numpy())
        self._host.send(amax * scale)
        self._is_sent = True

    def _judge(self, scaled: NDArray[np.float32]) -> None:
        """Count a step. `scaled`: float32 [num_slots], amax times scale; NaN or infinite where the amax is."""
        fits = (scaled >= _SMALLEST) & (scaled <= _LARGEST * self._fp8_max)
        self._runs = np.where(fits, 0, self._runs + ((scaled > 0) & (scaled < np.inf)))
        found = np.flatnonzero((self._runs >= NUM_STEPS) & ~self._named)
        if not found.size:
            return
        self._named[found] = True
        shown = "; ".join(self._describe(slot, scaled[slot]) for slot in found[:_NUM_SHOWN])
        more = f"; and {found.size - _NUM_SHOWN} more" if found.size > _NUM_SHOWN else ""
        self._say(
            f"fp8: delayed scales that have not fitted their tensors for {NUM_STEPS} steps: {found.size} "
            f'({shown}{more}). If it lasts, set "linear": {{"recipe": "tensorwise"}}, which scales each tensor by its '
            "own amax; what it may be: docs/troubleshooting.md"
        )

    def _describe(self, slot: int, scaled: float) -> str:
        what = "underflows" if scaled < _SMALLEST else "saturates"
        return f"{self._names[slot]} {what}: amax x scale is {scaled:.2g}, {self._fp8_max[slot]:g} would fit"
