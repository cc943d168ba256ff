"""FP8 optimizer states become fp32 in place: the ZeRO optimizer is then what one is that was built with fp32 states and
has loaded a checkpoint of this run, bit for bit.

Masters and moments are de-quantised one after another, and what they were de-quantised from is freed. FP8 weights are
quantised once more: a split master's high part by a power of two, an fp32 master as the recipe has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.optim.adamw import Fp8AdamW
from fp8_ds.optim.states import MOMENTS, Flat, dense_flat
from fp8_ds.zero.context import Fp8Context
from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight

_NO_CODES, _NO_SCALES = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.float32)
_LEFT_OVER = (
    "_fp8_alike",
    "fp8_flag",
    "_fp8_flats",
    "_fp8_format",
    "_fp8_names",
    "_fp8_shard_of",
    "_fp8_squares",
    "_fp8_waits",
)
"""What only FP8 states need."""


def widen12(zero: Any, new_class: type, context: Fp8Context, client: torch.optim.Optimizer) -> None:
    """`zero`, of ZeRO-1 or 2 with FP8 states, is of `new_class`, with fp32 states. Collective.

    Between steps, or inside `zero.fp8_dense()`: what was loaded there is taken as it is.

    Args:
        zero: retyped; gradients are not released.
        new_class: the class that fp32 states have.
        context: whose configuration is that of fp32 states already.
        client: the Adam that `zero.optimizer` was taken over from.
    """
    device, is_split = zero._fp8_kinds[0].buffer.device, zero._fp8_is_split
    _widen(zero, zero.single_partition_of_fp32_groups, client, device)
    _retype(zero, new_class)
    if is_split:
        quantizer = zero._fp8_quantizer = zero._fp8_make_quantizer(context, device)
        for slot, p in enumerate(zero._fp8_flat_order(context)):
            p._fp8.scale, p._fp8.scale_inv = quantizer.scale[slot], quantizer.scale_inv[slot]
    zero._hp_optimizer_states_linked = False
    zero._link_all_hp_params()
    zero._fp8_refresh(is_step=False)


def widen3(zero: Any, new_class: type, context: Fp8Context, client: torch.optim.Optimizer) -> None:
    """As `widen12`, of ZeRO-3."""
    device, is_split = zero._fp8_flat.device, zero._fp8_is_split
    zero._partition_all_parameters()  # what is gathered has scales that go
    _widen(zero, zero.fp32_partitioned_groups_flat, client, device)
    _retype(zero, new_class)
    if is_split:
        shards: Any = zero._fp8_shards
        del shards.owner
        shards.__class__ = Fp8Shards
        quantizer = shards.quantizer = zero._fp8_make_quantizer(context, device)
        for weight in shards.weights:
            weight.__dict__.pop("states", None)
            weight.__class__ = ShardedWeight
            payload, index = weight.payload, weight.index
            payload.scale, payload.scale_inv = quantizer.scale[index], quantizer.scale_inv[index]
    zero._fp8_set_sources()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    zero._fp8_refresh(is_step=False)
    zero.checkpoint_event_epilogue()


def _retype(zero: Any, new_class: type) -> None:
    zero.__class__ = new_class
    zero._fp8_is_split = zero._fp8_is_dense = False
    for name in _LEFT_OVER:
        zero.__dict__.pop(name, None)


@torch.no_grad()
def _widen(zero: Any, masters: list[Tensor], client: torch.optim.Optimizer, device: torch.device) -> None:
    """Masters are float32 on `device`, and `zero.optimizer` is a `client` with float32 moments."""
    optimizer: Fp8AdamW = zero.optimizer
    core, is_dense = optimizer.core, zero._fp8_is_dense
    core.scales.wait()
    has_moments = core.has_moments
    states = []
    for flat, master in zip(zero._fp8_flats, masters, strict=True):
        loaded = optimizer.state.pop(master, {}) if is_dense else {}
        if zero._fp8_is_split:
            master.data = master.data.to(device) if is_dense else dense_flat(flat, None, core.scales.scale_inv, device)
            for piece in flat.pieces:
                piece.shard.lo = None
        state: dict[str, Any] = {}
        for key in MOMENTS:
            if key in loaded:
                state[key] = loaded.pop(key).reshape(-1).to(device=device, dtype=torch.float32)
            elif has_moments:
                state[key] = dense_flat(flat, key, core.scales.scale_inv, device)
            _free(flat, key)
        if state:
            state["step"] = loaded.get("step", core.step_count[flat.row])
        states.append(state)
    become(optimizer, client)
    for master, state in zip(masters, states, strict=True):
        if state:
            optimizer.state[master] = {**state, "step": _step_of(client, state["step"], device)}


def _free(flat: Flat, key: str) -> None:
    for piece in flat.pieces:
        if key == "exp_avg":
            piece.shard.m, piece.shard.m_scale_inv = _NO_CODES, _NO_SCALES
        else:
            piece.shard.v, piece.shard.v_scale_inv = _NO_CODES, _NO_SCALES


def _step_of(client: torch.optim.Optimizer, step: Any, device: torch.device) -> Any:
    """A step count as `client` keeps it: a number, or a float32 tensor, which the kernels of some options read."""
    if not isinstance(client, torch.optim.Adam | torch.optim.AdamW):  # DeepSpeed's FusedAdam
        return int(step)
    on_device = any(group.get("fused") or group.get("capturable") for group in client.param_groups)
    return torch.as_tensor(step).to(device=device if on_device else "cpu", dtype=torch.float32, copy=True)


class _SharesGroups:
    """Mix-in before a torch optimizer whose list of groups others hold: schedulers, and whoever has the client."""

    param_groups: list[dict[str, Any]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stock, in the same list and the same groups."""
        shared = self.param_groups
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for group, loaded in zip(shared, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = shared


def become(optimizer: Fp8AdamW, client: torch.optim.Optimizer) -> None:
    """`optimizer`, the same object with the same groups, steps as `client` does; its state is empty.

    Args:
        optimizer: that was taken over from `client`; whoever holds it (engine, schedulers) goes on with it.
    """
    optimizer.state.clear()
    own = {"param_groups": optimizer.param_groups, "state": optimizer.state, "_opt_called": True}
    options = {name: value for name, value in client.__dict__.items() if name != "step"}  # a scheduler's wrapper
    optimizer.__dict__.clear()
    optimizer.__dict__.update({**options, **own})
    optimizer.__class__ = type(type(client).__name__, (_SharesGroups, type(client)), {})
