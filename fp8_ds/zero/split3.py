"""FP8 weights of ZeRO-3 whose shards are the high parts of split masters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight, newer


class SplitWeight(ShardedWeight):
    """An FP8 weight whose shard is the high part of its masters."""

    states: Any = None

    @property
    def source(self) -> Tensor:
        """float32 [num_real]: the masters, decoded; a new tensor. Of a frozen weight its bf16 shard."""
        if self.states is None:
            return self.param.ds_tensor.data[: self.num_real]
        owner, shard = self.states
        return owner.fp8_read_master(shard)

    @source.setter
    def source(self, value: Tensor) -> None:
        """Nothing: there is one place where masters lie."""

    def read_source(self, out: Tensor) -> None:
        if self.states is None:
            super().read_source(out)
        else:
            owner, shard = self.states
            owner.fp8_read_master(shard, out)


class SplitShards(Fp8Shards):
    """FP8 weights of ZeRO-3 whose shards are the high parts of masters."""

    owner: Any

    def absorb(self, weights: list[ShardedWeight]) -> None:
        """What a user wrote becomes the master (stock keeps it only until the next step). Collective.

        Elements that were not changed keep their full precision.
        """
        trainable = [weight for weight in weights if weight.is_trainable]
        values = [newer(w.source, w.param.ds_tensor.data[: w.num_real]) for w in trainable]
        if trainable:
            self.owner.fp8_write_masters(trainable, values)
        frozen = [weight for weight in weights if not weight.is_trainable]
        if frozen:
            super().absorb(frozen)
        self.mark_ready()
