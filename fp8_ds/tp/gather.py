"""One all-gather of FP8 codes and their scales; the codes land where the GEMM reads them.

Shape suffixes: S tokens of one rank, T = S n tokens of all n ranks, C channels.

Two buffers, codes [S, C] and scales [k] of every rank, travel in one collective (`all_gather_each`: on NCCL one
launch of grouped all-gathers; on gloo, which concatenates them, one all-gather). Codes behind which the scales
lie in the same buffer would arrive with gaps between the ranks' rows, and a GEMM over all of them, or a transpose,
would need a copy first (docs/decisions/0007).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.grouped import all_gather_each


@dataclass(frozen=True)
class Shard:
    """What a rank sends.

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

    Args:
        group: the ranks whose shards these are.
        shard: of this rank.
        chunks: 1: one all-gather. More: shards go from peer to peer, each in pieces, about so many in all, and
            `pieces` hands them out as they arrive. Codes and scales are the same, products of pieces within a rounding.

    Attributes:
        shape: (T, C).
        num_bytes: that the gather delivers to this rank, its own share included.
    """

    def __init__(self, group: dist.ProcessGroup, shard: Shard, chunks: int = 1) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        num_tokens, num_channels = shard.codes.shape
        self.tokens_per_rank = num_tokens
        self._codes = shard.codes.new_empty((self.size * num_tokens, num_channels))
        self._scales = shard.scale_inv.new_empty((self.size, *shard.scale_inv.shape))
        self.shape = (self.size * num_tokens, num_channels)
        self.num_bytes = self._codes.numel() + 4 * self._scales.numel()
        self._shard: Shard | None = shard  # alive until it has been sent
        self._cache: dict[str, Any] = {}
        if chunks == 1 or self.size == 1:
            self._arrivals = [(slice(0, self.shape[0]), self._all_gather(group, shard))]
        else:
            self._arrivals = self._exchange(group, shard, max(1, min(chunks // self.size, num_tokens)))

    @classmethod
    def assembled(cls, codes: Tensor, scale_inv: Tensor) -> Gathered:
        """What is whole on this rank: codes FP8 [T, C], scale_inv as a rank with all tokens would send them."""
        gathered = cls.__new__(cls)
        gathered.size, gathered.rank, gathered.tokens_per_rank = 1, 0, codes.shape[0]
        gathered._codes, gathered._scales = codes, scale_inv[None]
        gathered.shape, gathered.num_bytes = (codes.shape[0], codes.shape[1]), 0
        gathered._shard, gathered._cache, gathered._arrivals = None, {}, []
        return gathered

    @classmethod
    def arrived_whole(cls, codes: Tensor, scale_inv: Tensor, rank: int) -> Gathered:
        """What is there: codes FP8 [T, C], scale_inv float32 [n, ...] as the ranks sent them; on rank `rank`."""
        gathered = cls.assembled(codes, scale_inv)
        gathered.size, gathered.rank, gathered._scales = scale_inv.shape[0], rank, scale_inv
        gathered.tokens_per_rank = codes.shape[0] // gathered.size
        return gathered

    def _all_gather(self, group: dist.ProcessGroup, shard: Shard) -> Callable[[], Any]:
        received = [_bytes(self._codes), _bytes(self._scales)]
        return all_gather_each(received, [_bytes(shard.codes), _bytes(shard.scale_inv)], group).wait

    def _exchange(
        self, group: dist.ProcessGroup, shard: Shard, pieces_per_rank: int
    ) -> list[tuple[slice, Callable[[], Any]]]:
        """In step i each rank sends to the i-th before it and receives from the i-th after it; its own rows are there
        at once. On NCCL all of it runs on the communicator's stream, beside the GEMMs of what has arrived."""
        tokens, mine = self.tokens_per_rank, self.rank * self.tokens_per_rank
        self._codes[mine : mine + tokens].copy_(shard.codes)
        self._scales[self.rank].copy_(shard.scale_inv)
        arrivals: list[tuple[slice, Callable[[], Any]]] = [(slice(mine, mine + tokens), _nothing)]
        bounds = [tokens * i // pieces_per_rank for i in range(pieces_per_rank + 1)]
        for step in range(1, self.size):
            target, source = (self.rank - step) % self.size, (self.rank + step) % self.size
            for first, last in itertools.pairwise(bounds):
                here = slice(source * tokens + first, source * tokens + last)
                sent, received = [_bytes(shard.codes[first:last])], [_bytes(self._codes[here])]
                if first == 0:
                    sent.append(_bytes(shard.scale_inv))
                    received.append(_bytes(self._scales[source]))
                operations = [_p2p(dist.isend, tensor, group, target) for tensor in sent]
                operations += [_p2p(dist.irecv, tensor, group, source) for tensor in received]
                arrivals.append((here, _Works(dist.batch_isend_irecv(operations))))
        return arrivals

    def pieces(self) -> Iterator[slice]:
        """Rows as they arrive, each waited for; later all of it at once. Consecutive uses may ask again."""
        while self._arrivals:
            rows, wait = self._arrivals[0]
            wait()
            self._arrivals.pop(0)
            if not self._arrivals:
                self._shard = None
            yield rows

    @property
    def is_under_way(self) -> bool:
        """Whether `pieces` has something to wait for, in more than one part."""
        return len(self._arrivals) > 1

    @property
    def codes(self) -> Tensor:
        """FP8 [T, C], contiguous; waits for all of it."""
        self._wait()
        return self._codes

    @property
    def scale_inv(self) -> Tensor:
        """float32 [n, ...] as each rank sent them; waits for all of it."""
        self._wait()
        return self._scales

    def _wait(self) -> None:
        if self._arrivals:
            for _ in self.pieces():
                pass

    def arrived(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(codes [.., C], scale_inv [...] of their rank) of rows that `pieces` has handed out."""
        rank = rows.start // self.tokens_per_rank
        return self._codes[rows], self._scales[rank]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, or what it gave the first time: several layers read the same operand."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def __call__(self) -> None:
        for work in self.works:
            work.wait()


def _nothing() -> None:
    return None


def _p2p(operation: Any, tensor: Tensor, group: dist.ProcessGroup, peer: int) -> Any:
    return dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)
