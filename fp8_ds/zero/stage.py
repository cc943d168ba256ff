"""Common parts of ZeRO in all stages: `Fp8Context`, which the engine hands to them, and offload.

`engine.offload_states` and `reload_states` move the tensors that FP8 holds in place of DeepSpeed's: `lp_params` are the
compact buffers or shards. With FP8 states `hp_params` are the low parts of masters, and `optim_states` the moments with
their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor, nn

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.config import Fp8Config
from fp8_ds.nn.linear.payload import Granularity, granularity_of
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.nn.plan.plan import Plan
from fp8_ds.numerics.scale import AmaxHistory

if TYPE_CHECKING:
    from fp8_ds.engine.precision import LayerPrecision
    from fp8_ds.zero.release import ReleaseUpdater


@dataclass
class Fp8Context:
    """Configuration and shared objects of one engine.

    A weight counts as trainable if it was so at the start: one that a user freezes later keeps its master.

    Args:
        weights: name -> Parameter of every converted weight, in module order.
        history: amax histories of the recipe `delayed`, else None.
        check_overflow: `bf16.check_grad_overflow`.
        release: updates weights during the backward; None without gradient release.
        precision: which layers compute in bf16; None until the engine is built.
        started_with: the configuration before a checkpoint has changed it; None if none has.
        stored: scales of weights that came in FP8, by id of the Parameter, in FP8 or not. The data of frozen weights in
            FP8 are their bytes, in uint8, until `fp8_init`; bf16 of the others.
    """

    config: Fp8Config
    plan: Plan
    weights: dict[str, nn.Parameter]
    history: AmaxHistory | None = None
    counter: ByteCounter = field(default_factory=ByteCounter)
    check_overflow: bool = True
    release: ReleaseUpdater | None = None
    precision: LayerPrecision | None = None
    started_with: Fp8Config | None = None
    stored: dict[int, StoredScales] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trainable = frozenset(name for name, p in self.weights.items() if p.requires_grad)

    @property
    def granularity(self) -> Granularity:
        """Elements of a weight that share a scale."""
        linear, is_split = self.config.linear, self.config.optimizer.states == "fp8"
        return granularity_of(linear.recipe, is_split=is_split, is_pow2=linear.weight_scales == "power_of_two")

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name in self._trainable}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name not in self._trainable}

    @property
    def quantized(self) -> dict[str, nn.Parameter]:
        """Weights that this engine quantises: not the frozen ones that came in FP8."""
        frozen = self.frozen
        return {name: p for name, p in self.weights.items() if name not in frozen or id(p) not in self.stored}

    def first_scales(self, parameters: Iterable[nn.Parameter]) -> dict[int, Tensor]:
        """Return scale_inv of those of `parameters` that came in FP8 with scales as this engine's, by index."""
        is_pow2 = self.granularity.is_pow2 or self.config.optimizer.states == "fp8"
        own, stored = replace(self.granularity, is_pow2=is_pow2), [self.stored.get(id(p)) for p in parameters]
        grids = {index: one.as_grid(own) for index, one in enumerate(stored) if one is not None}
        return {index: grid for index, grid in grids.items() if grid is not None}


def split_lp_params(optimizer: Any, include: Any, device: Any) -> tuple[Any, bool, Any]:
    """Return (the states to offload except `lp_params`, whether to offload these now, the device)."""
    device = OffloadDeviceEnum.cpu if device is None else device
    wanted = set(OffloadStateTypeEnum) if include is None else set(include)
    with_weights = OffloadStateTypeEnum.lp_params in wanted
    already = OffloadStateTypeEnum.lp_params in optimizer.offloaded_states
    return wanted - {OffloadStateTypeEnum.lp_params}, with_weights and not already, device


def offload_weights(optimizer: Any, move: Callable[[torch.device], None], device: Any) -> None:
    """Move the weights to `device` by `move`; readers still work there, compute does not."""
    move(torch.device(device.value))
    optimizer.offloaded_states.add(OffloadStateTypeEnum.lp_params)


def reload_weights(optimizer: Any, move: Callable[[torch.device], None]) -> None:
    if OffloadStateTypeEnum.lp_params in optimizer.offloaded_states:
        move(torch.device(get_accelerator().current_device_name()))
        optimizer.offloaded_states.remove(OffloadStateTypeEnum.lp_params)
