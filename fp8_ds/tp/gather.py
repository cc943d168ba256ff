"""One all-gather of FP8 codes and their scales; the codes land where the GEMM reads them.

Shape suffixes: S tokens of one rank, T = S n tokens of all n ranks, C channels.

Two buffers, codes [S, C] and scales [k] of every rank, travel in one collective (`all_gather_each`: on NCCL one
launch of grouped all-gathers; on gloo, which concatenates them, one all-gather). Codes behind which the scales
lie in the same buffer would arrive with gaps between the ranks' rows, and a GEMM over all of them, or a transpose,
would need a copy first (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import all_gather_each


@dataclass(frozen=True)
class Shard:
    """Codes and scales that a rank sends.

    Args:
        codes: FP8 [S, C], contiguous.
        scale_inv: float32, contiguous, any shape, the same on all ranks; multiply to leave FP8.
    """

    codes: Tensor
    scale_inv: Tensor


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class Gathered:
    """Codes and scales of all ranks, there or under way.

    Attributes:
        shape: (T, C).
        num_bytes: bytes that the gather delivers to this rank, its own share included.
    """

    def __init__(self, group: dist.ProcessGroup, shard: Shard) -> None:
        size = dist.get_world_size(group)
        num_tokens, num_channels = shard.codes.shape
        self._codes = shard.codes.new_empty((size * num_tokens, num_channels))
        self._scales = shard.scale_inv.new_empty((size, *shard.scale_inv.shape))
        self.shape = (size * num_tokens, num_channels)
        self.num_bytes = self._codes.numel() + 4 * self._scales.numel()
        self._cache: dict[str, Any] = {}
        self._shard: Shard | None = shard  # alive until it has been sent
        received = [_bytes(self._codes), _bytes(self._scales)]
        self._work: Any = all_gather_each(received, [_bytes(shard.codes), _bytes(shard.scale_inv)], group)

    @classmethod
    def arrived_whole(cls, codes: Tensor, scale_inv: Tensor) -> Gathered:
        """Wrap what has arrived: codes FP8 [T, C], scale_inv float32 [n, ...] as the ranks sent them."""
        gathered = cls.__new__(cls)
        gathered._codes, gathered._scales = codes, scale_inv
        gathered.shape, gathered.num_bytes = (codes.shape[0], codes.shape[1]), 0
        gathered._cache, gathered._shard, gathered._work = {}, None, None
        return gathered

    @property
    def codes(self) -> Tensor:
        """Codes, FP8 [T, C], contiguous; waits for all of it."""
        self._wait()
        return self._codes

    @property
    def scale_inv(self) -> Tensor:
        """Scales, float32 [n, ...] as each rank sent them; waits for all of it."""
        self._wait()
        return self._scales

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = self._shard = None

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return `make()`, or what it gave the first time: several layers read the same operand."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]
