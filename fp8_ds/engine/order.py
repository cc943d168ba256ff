"""Every rank hands ZeRO its parameters in one order.

ZeRO cuts flat tensors, so that a rank's elements are whatever lies there. Parameter groups that were made from a set,
or modules that were, have another order in each process. Stock code then adds up gradients of different parameters,
silently where their sizes are alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm

from fp8_ds.errors import ConfigError
from fp8_ds.tp.group import digest


def refuse_other_order(
    param_groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], group: Any, device: torch.device
) -> None:
    """Nothing happens if the groups have the same parameters in the same order on all ranks. Collective over all.

    Args:
        param_groups: of the optimizer that ZeRO is to take over.
        names: of the model's parameters.
        group: ZeRO's ranks.
        device: of the ranks.

    Raises:
        ConfigError: they do not; on all ranks, those of other groups too.
    """
    order = [[names.get(p, "not of the model") for p in each["params"]] for each in param_groups]
    number = digest(json.dumps(order))
    largest = torch.tensor([number, -number], dtype=torch.int64, device=device)
    ds_comm.all_reduce(largest, op=ds_comm.ReduceOp.MAX, group=group)
    differ = (largest[0] != -largest[1]).to(torch.int64).view(1)
    is_here = bool(differ)
    ds_comm.all_reduce(differ, op=ds_comm.ReduceOp.MAX)
    if not bool(differ):
        return
    found = "other orders on other ranks of the model"
    if is_here:
        first: list[Any] = [order]
        ds_comm.broadcast_object_list(first, src=dist.get_global_rank(group, 0), group=group)
        found = _difference(first[0], order) or f"another order than rank {dist.get_global_rank(group, 0)}'s elsewhere"
    raise ConfigError(
        f"model_parameters: expected the same parameters in the same order on all ranks, got {found}. Build groups "
        "from lists, as named_parameters() gives them: sets have an order of their own in each process."
    )


def _difference(expected: list[list[str]], got: list[list[str]]) -> str:
    """The first one, as far as there is one; empty if there is none."""
    for number, (left, right) in enumerate(zip_longest(expected, got, fillvalue=())):
        for place, (theirs, mine) in enumerate(zip_longest(left, right, fillvalue="nothing")):
            if theirs != mine:
                where = f"in place {place} of group {number}"
                return f"{mine} {where} on rank {dist.get_rank()}, where the first rank has {theirs}"
    return ""
