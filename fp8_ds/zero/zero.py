"""Zero: FP8 of one ZeRO optimizer, as far as it is the same in all stages.

`engine.offload_states` and `reload_states` move the tensors that FP8 holds in place of DeepSpeed's: `lp_params` are the
compact buffers or shards. With FP8 states `hp_params` are the low parts of masters, and `optim_states` the moments with
their scales.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from fp8_ds.zero.release import refuse_model_parallel
from fp8_ds.zero.split_states import Masters
from fp8_ds.zero.stage import Fp8Context, ZeroHost

_WEIGHTS = OffloadStateTypeEnum.lp_params


class Zero:
    """FP8 of the optimizer `host`. Collective, here and in all methods that gather.

    Attributes:
        masters: of this rank's part of the parameters.
        has_states: whether these and the moments are in FP8.
        remembered: what repairs of DeepSpeed (engine/deepspeed_fixes.py) keep from one method to the next, by name.
    """

    masters: Masters

    def __init__(self, host: ZeroHost, context: Fp8Context) -> None:
        self.host = host
        self.context = context
        self.remembered: dict[str, Any] = {}
        self.has_states = context.config.optimizer.states == "fp8"
        if self.has_states and context.config.optimizer.releases(host.clip_grad):
            refuse_model_parallel(host.model_parallel_group)

    @property
    def is_held(self) -> bool:
        """Whether a refresh has to wait, because masters that are split are dense: that ends with one."""
        return self.masters.states is not None and self.masters.is_dense

    def refresh(self, is_step: bool) -> None:
        """Update the weights from the masters, unless it `is_held`."""
        raise NotImplementedError

    def move(self, device: torch.device) -> None:
        """Move the weights to `device`."""
        raise NotImplementedError

    @contextmanager
    def dense(self) -> Iterator[dict[str, Tensor]]:
        """Make masters dense float32 inside the block; moments put into `optimizer.state` stay there.

        On leaving, what is kept in FP8 is quantised, and the weights follow.

        Yields:
            a dict that may be filled with scale_inv by weight name, to store split masters with.
        """
        if self.masters.is_dense:
            yield {}
            return
        try:
            with self.masters.dense() as scales:
                yield scales
        finally:
            self.refresh(is_step=False)
            self.end_dense()

    def end_dense(self) -> None:
        """Finish leaving `dense`, once the weights follow; ZeRO-3 gathers persistent parameters again."""

    def offload(self, original: Callable[..., None], include: Any, device: Any, **kwargs: Any) -> None:
        """Move states to `device`, and give their memory back; readers of weights still work there, compute does not.

        Args:
            original: DeepSpeed's `offload_states`.
        """
        host, device = self.host, OffloadDeviceEnum.cpu if device is None else device
        wanted = self.masters.offload(include, device)
        wanted = set(OffloadStateTypeEnum) if wanted is None else set(wanted)
        if others := wanted - {_WEIGHTS}:  # DeepSpeed before 0.19.8 offloads nothing without its own FusedAdam
            original(include=others, device=device, **kwargs)
        if _WEIGHTS in wanted and _WEIGHTS not in host.offloaded_states:
            self.move(torch.device(device.value))
            host.offloaded_states.add(_WEIGHTS)
        self.masters.point()  # views of what has left would keep its memory
        gc.collect()  # after DeepSpeed's own offload, which does the same for what it has moved
        get_accelerator().empty_cache()

    def reload(self, original: Callable[..., None], non_blocking: bool) -> None:
        self.masters.reload()
        if _WEIGHTS in self.host.offloaded_states:  # first: DeepSpeed would move its flat buffer, which is meta here
            self.move(torch.device(get_accelerator().current_device_name()))
            self.host.offloaded_states.remove(_WEIGHTS)
        original(non_blocking=non_blocking)
        self.masters.point()
