"""Check, early in a run, that the bf16 steps at its end will fit into the GPU's memory: none shall die of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8_ds.config.presets import is_written
from fp8_ds.engine.ranks import tell_all

_MAX_SHARE = 0.95
"""Share of the memory that can be had; the rest is for what the allocator cannot use."""
_FIRST, _SECOND = 3, 5
"""Steps of this process after which it is judged, the second time by what training alone has reserved."""


class Memory(NamedTuple):
    """Bytes of one GPU: allocated now, between two steps; no less than a step has had; what this process can have."""

    now: int
    peak: int
    available: int


class Bf16Memory:
    """Judge of one engine.

    Between two steps nothing of forward and backward is left. So the peak less what is allocated there is activations,
    gradients and gathered weights. At most all of it is FP8 bytes, which are twice as large in bf16.

    Args:
        extra: bytes that weights take beside their FP8 bytes while all compute in bf16.
        read: returns this rank's memory.
        empty_cache: gives back what is reserved and not allocated.
    """

    def __init__(self, extra: int, read: Callable[[], Memory], empty_cache: Callable[[], object]) -> None:
        self.extra, self._read, self._empty_cache = extra, read, empty_cache
        self._num_steps = 0

    @classmethod
    def of(cls, engine: Any) -> Bf16Memory | None:
        """Build the judge; None if no such steps are to come, or the user asked for them, or there is no GPU."""
        block = engine._config._param_dict["fp8"]
        asked = is_written(block, "schedule", "bf16_last_fraction")
        schedule = engine.fp8.precision.schedule
        if engine.device.type != "cuda" or asked or schedule.last is None or schedule.last <= engine.global_steps:
            return None
        num, device = sum(getattr(p, "ds_numel", p.numel()) for p in engine.fp8.trainable.values()), engine.device
        if engine.zero_optimization_partition_weights():
            num //= dist.get_world_size(engine.optimizer.dp_process_group)
        return cls(2 * num, lambda: _memory(device), torch.cuda.empty_cache)

    def after_step(self) -> bool | None:
        """Judge after a step. Collective in the steps in which it does.

        Returns:
            Whether the bf16 steps fit on all ranks; None: not judged, or yet to be judged again.
        """
        self._num_steps += 1
        if self._num_steps not in (_FIRST, _SECOND):
            return None
        memory = self._read()
        needed = memory.peak + self.extra + (memory.peak - memory.now)
        if all(tell_all(needed <= _MAX_SHARE * memory.available)):
            self._num_steps = _SECOND
            return True
        if self._num_steps == _FIRST:  # the peak may be that of building the engine
            self._empty_cache()
            return None
        return False


def _memory(device: torch.device) -> Memory:
    """Read a GPU's memory. The allocator keeps what a step has had, until its cache is emptied: so nobody's peak in
    torch's statistics needs to start anew."""
    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    peak = min(torch.cuda.max_memory_allocated(device), reserved)
    return Memory(torch.cuda.memory_allocated(device), peak, free + reserved)
