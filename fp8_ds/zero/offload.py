"""`engine.offload_states` / `reload_states` for what FP8 holds in place of DeepSpeed's tensors.

Of weights (`lp_params`) the compact buffers; with FP8 states of masters (`hp_params`) the low parts, and the moments
(`optim_states`) with their scales.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum


def split_lp_params(optimizer: Any, include: Any, device: Any) -> tuple[Any, bool, Any]:
    """Take `lp_params` out of what stock code shall offload.

    Returns:
        the states left for stock, whether the weights shall be offloaded now, and the device.
    """
    device = OffloadDeviceEnum.cpu if device is None else device
    wanted = set(OffloadStateTypeEnum) if include is None else set(include)
    with_weights = OffloadStateTypeEnum.lp_params in wanted
    already = OffloadStateTypeEnum.lp_params in optimizer.offloaded_states
    return wanted - {OffloadStateTypeEnum.lp_params}, with_weights and not already, device


def offload_kinds(optimizer: Any, device: Any) -> None:
    """Move the compact buffers of ZeRO-1/2 to `device`; readers still work there, compute does not."""
    _move(optimizer, torch.device(device.value))
    optimizer.offloaded_states.add(OffloadStateTypeEnum.lp_params)


def reload_kinds(optimizer: Any) -> None:
    """Bring the compact buffers back and point every parameter into them again."""
    if OffloadStateTypeEnum.lp_params in optimizer.offloaded_states:
        _move(optimizer, torch.device(get_accelerator().current_device_name()))
        optimizer.offloaded_states.remove(OffloadStateTypeEnum.lp_params)


def offload_adam(optimizer: Any, include: Any, device: Any) -> set[OffloadStateTypeEnum]:
    """Move low parts and moments to `device`; returns the states left for stock. Pageable memory, one copy each."""
    wanted = set(OffloadStateTypeEnum) if include is None else set(include)
    ours = {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}
    chosen = (wanted & ours) - optimizer.offloaded_states
    _move_adam(optimizer, chosen, torch.device("cpu" if device is None else device.value))
    optimizer.offloaded_states.update(chosen)
    return wanted - ours


def reload_adam(optimizer: Any) -> None:
    """Bring low parts and moments back."""
    chosen = optimizer.offloaded_states & {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}
    _move_adam(optimizer, chosen, torch.device(get_accelerator().current_device_name()))
    optimizer.offloaded_states.difference_update(chosen)


def _move_adam(optimizer: Any, chosen: set[OffloadStateTypeEnum], device: torch.device) -> None:
    core = optimizer.optimizer.core
    for shard in core.shards:
        if OffloadStateTypeEnum.optim_states in chosen:
            shard.m, shard.v = shard.m.to(device), shard.v.to(device)
            shard.m_scale_inv, shard.v_scale_inv = shard.m_scale_inv.to(device), shard.v_scale_inv.to(device)
        if OffloadStateTypeEnum.hp_params in chosen and shard.lo is not None:
            shard.lo = shard.lo.to(device)
    core.moved()


def _move(optimizer: Any, device: torch.device) -> None:
    optimizer._fp8_point_params(keep_values=True)
    for fp8, hp in zip(optimizer._fp8_kinds, optimizer._hp_kinds, strict=True):
        fp8.buffer = fp8.buffer.to(device)
        hp.buffer = hp.buffer.to(device)
        for index, p in enumerate(fp8.params):
            p._fp8.data = fp8.view(index)
        for index, p in enumerate(hp.params):
            p.data = hp.view(index)
    for bf16 in optimizer._fp8_bf16_kinds:
        bf16.buffer = bf16.buffer.to(device)
        for index, p in enumerate(bf16.params):
            p._fp8.hp = bf16.view(index)
