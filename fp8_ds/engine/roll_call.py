"""Do all ranks have FP8 on in this call of `deepspeed.initialize`, or none? Nobody waits for the answer.

Ranks with FP8 start with an all-gather (fingerprint.py), which ranks without never join. So each rank first marks its
side in the default group's store, and only then looks for a mark of the other: whichever side comes second sees the
first, raises, and its end ends the job in seconds, where the first would have waited for the group's time-out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8_ds.errors import ConfigError

_SIDES = ("off", "on")


def own_rank() -> int:
    """In the default group, also where a launcher has named it and the group is not there yet; 0 where nobody has."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_one_of_many(arguments: Mapping[str, Any]) -> bool:
    """Whether there are other ranks; then the default group is there afterwards, made as stock would make it next.

    Args:
        arguments: of `deepspeed.initialize`.
    """
    if not dist.is_initialized():
        is_launched = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
        required = arguments.get("dist_init_required")
        if not is_launched or int(os.environ.get("WORLD_SIZE", "1")) < 2 or required is False:
            return False
        from deepspeed import comm as ds_comm
        from deepspeed.accelerator import get_accelerator

        options = {"distributed_port": arguments["distributed_port"]} if "distributed_port" in arguments else {}
        backend = get_accelerator().communication_backend_name()
        ds_comm.init_distributed(dist_backend=backend, dist_init_required=required, **options)
    return dist.get_world_size() > 1


def take_side(is_on: bool, arguments: Mapping[str, Any]) -> ConfigError | None:
    """This rank's side is marked; what to raise if a rank has marked the other one. There is a default group.

    Calls are counted, and the n-th of one rank is held against the n-th of others: stock code has collectives over all
    ranks in each call without `mpu`. Those with one may be of some ranks alone, and are left out.

    Args:
        is_on: "fp8" is enabled on this rank.
        arguments: of `deepspeed.initialize`.
    """
    store = distributed_c10d._get_default_store()
    if arguments.get("mpu") is not None or store is None:  # MPI has none
        return None
    rank = dist.get_rank()
    try:
        number = store.add(f"fp8_ds/calls/{rank}", 1)
        store.set(f"fp8_ds/{number}/{_SIDES[is_on]}", str(rank))
        others = f"fp8_ds/{number}/{_SIDES[not is_on]}"
        if not store.check([others]):
            return None
        other = int(store.get(others))
    except RuntimeError:  # a store that cannot do this; or its host is gone, which collectives will say
        return None
    on, off = (rank, other) if is_on else (other, rank)
    return ConfigError(
        f"expected fp8 to be enabled on all ranks or on none, got it on rank {on} and not on rank {off}. Give all "
        "hosts the same configuration."
    )
