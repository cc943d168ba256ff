"""ParallelGroups: tensor-parallel and data-parallel groups, as DeepSpeed's `mpu` argument wants to see them."""

from __future__ import annotations

import torch.distributed as dist

from fp8_ds.errors import ConfigError


class ParallelGroups:
    """Groups of neighbouring ranks, which share a model, and of ranks at equal places in it, which share data.

    With 4 ranks and 2 of tensor parallelism: tensor-parallel (0, 1) and (2, 3), data-parallel (0, 2) and (1, 3). Make
    it on all ranks alike, for `deepspeed.initialize(..., mpu=groups)`.

    Args:
        tp_size: ranks of a tensor-parallel group.

    Raises:
        ConfigError: the number of ranks is no multiple of it.
    """

    def __init__(self, tp_size: int) -> None:
        world = dist.get_world_size()
        if tp_size < 1 or world % tp_size:
            raise ConfigError(f"tp_size: expected a divisor of {world} ranks, got {tp_size}. Choose another.")
        sharing_model = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
        sharing_data = [list(range(first, world, tp_size)) for first in range(tp_size)]
        self.tp_group = dist.new_subgroups_by_enumeration(sharing_model)[0]
        self.dp_group = dist.new_subgroups_by_enumeration(sharing_data)[0]

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tp_group

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tp_group)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tp_group)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self.tp_group, 0)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.dp_group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.dp_group)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.dp_group)
