"""Construction of DeepSpeed's ZeRO optimizers without dense masters, moments or gradients, for FP8 states.

DeepSpeed looks its optimizer classes up by name, and finds a subclass without the state initialisation inside
`building`. Seams: fp8_ds/engine/seams.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine as engine_module
import deepspeed.runtime.zero.stage3 as stage3_module
from deepspeed.accelerator import get_accelerator

from fp8_ds.zero.release import bucket_size
from fp8_ds.zero.weights import virtual_flat


class BuildingHost:
    fp8_releases = False


class Building12(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer."""

    @property
    def device(self) -> Any:
        """Device on which DeepSpeed makes its masters: meta, without memory."""
        return "meta"

    @device.setter
    def device(self, value: Any) -> None:
        self.__dict__["_fp8_device"] = value


class Building3(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3."""

    def initialize_optimizer_states(self) -> None:
        """Do nothing: moments come with the first step, and gradients are not copied to fp32."""

    def _setup_for_real_optimizer(self: Any) -> None:
        """Set up; with gradient release, without a buffer for all gradients and with small buckets."""
        if not self.fp8_releases:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
            return
        copies = 2  # the bucket, and what the reduction concatenates
        self.reduce_bucket_size = min(self.reduce_bucket_size, bucket_size(copies, self.dtype))
        device, self.device = self.device, "meta"
        try:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
        finally:
            self.device = device

    def _create_fp32_partitions(self: Any) -> None:
        device = get_accelerator().current_device_name()
        for numel, ids in zip(
            self.fp16_partitioned_groups_flat_numel, self.fp16_partitioned_groups_flat_id, strict=True
        ):
            flat: Any = virtual_flat(int(numel), device)
            flat.ds_id = f"{ids[0]}_{ids[-1]}"
            self.fp32_partitioned_groups_flat.append(flat)
        for group in self.optimizer.param_groups:
            group["params"] = []


@contextmanager
def building(releases: bool) -> Iterator[None]:
    """Let DeepSpeed build these classes instead of its own inside the block. `releases`: with gradient release."""
    places = (
        (engine_module, "DeepSpeedZeroOptimizer", Building12),
        (stage3_module, "DeepSpeedZeroOptimizer_Stage3", Building3),
    )
    original = [getattr(module, name) for module, name, _ in places]
    attributes = {"fp8_releases": releases}
    for (module, name, mixin), host in zip(places, original, strict=True):
        setattr(module, name, type(f"Building{host.__name__}", (mixin, host), attributes))
    try:
        yield
    finally:
        for (module, name, _), host in zip(places, original, strict=True):
            setattr(module, name, host)
