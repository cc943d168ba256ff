"""ParallelGroups: tensor-parallel and data-parallel groups, as DeepSpeed's `mpu` argument wants to see them."""

from __future__ import annotations

import torch.distributed as dist

from fp8_ds.errors import ConfigError


class ParallelGroups:
    """Neighbouring ranks share a model, ranks at equal places in it share data.

    With 4 ranks and 2 of tensor parallelism: tensor-parallel (0, 1) and (2, 3), data-parallel (0, 2) and (1, 3).
    Made on all ranks alike. `deepspeed.initialize(..., mpu=groups)`.

    Args:
        tp_size: ranks of a tensor-parallel group.

    Raises:
        ConfigError: the number of ranks is no multiple of it.
    """

    def __init__(self, tp_size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if tp_size < 1 or world % tp_size:
            raise ConfigError(f"tp_size: expected a divisor of {world} ranks, got {tp_size}. Choose another.")
        self.tp_group, self._tp_ranks = self._groups(
            [list(range(first, first + tp_size)) for first in range(0, world, tp_size)], rank
        )
        self.dp_group, self._dp_ranks = self._groups(
            [list(range(first, world, tp_size)) for first in range(tp_size)], rank
        )

    @staticmethod
    def _groups(all_ranks: list[list[int]], rank: int) -> tuple[dist.ProcessGroup, list[int]]:
        mine = None
        for ranks in all_ranks:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = group, ranks
        assert mine is not None
        return mine

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tp_group

    def get_model_parallel_world_size(self) -> int:
        return len(self._tp_ranks)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tp_group)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._tp_ranks[0]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._dp_ranks

    def get_data_parallel_world_size(self) -> int:
        return len(self._dp_ranks)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.dp_group)
