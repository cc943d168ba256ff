"""ZeRO-3: frozen weights with the bytes and scales of an FP8 folder (nn/linear/stored.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import max_reduce
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.quantize import quantize_part
from fp8_ds.zero.sharded import ShardedWeight


class StoredWeight(ShardedWeight):
    """A frozen weight that came in FP8: bytes and scales are its folder's, and there is no bf16 shard.

    Args:
        param: the ZeRO-3 Parameter, whose shard is of bytes.
        stored: its scales.
    """

    is_stored = True

    def __init__(self, name: str, param: Any, stored: StoredScales) -> None:
        self.stored = stored
        self._codes: Tensor | None = param.ds_tensor.data
        param.data = torch.empty(0, dtype=torch.bfloat16, device=param.ds_tensor.device)
        self._attach(name, param, stored.scale, stored.scale_inv)
        self.drop_bf16()

    def fill(self) -> None:
        """Move the bytes from DeepSpeed's shard to `shard`."""
        assert self._codes is not None
        self.shard[: self.num_real].view(torch.uint8).copy_(self._codes[: self.num_real])
        self._codes = None

    @property
    def source(self) -> Tensor:
        """Codes times scales, float32 [num_real], in a new tensor."""
        values = self.shard[: self.num_real].float()
        self.stored.multiply_(values, self.start)
        return values

    @source.setter
    def source(self, value: Tensor) -> None:
        """Do nothing: the bytes are the weight."""

    @property
    def keeps_bf16(self) -> bool:
        return False

    def absorb(self, group: dist.ProcessGroup) -> None:
        """Quantise the bf16 shards that users have written, unless all are what was read. Collective.

        Values that were read keep their bytes: the rule for new scales is another than that of the folder's.
        """
        written, stored = self.param.ds_tensor.data[: self.num_real], self.stored
        is_other = torch.tensor([not torch.equal(written, self.source.to(written.dtype))], dtype=torch.float32)
        is_other = is_other.to(self.shard.device)
        max_reduce(group, is_other)
        if not bool(is_other):
            return
        shape = self.param.ds_shape
        amax = stored.granularity.amax(written, shape, self.start)
        max_reduce(group, amax)
        scale, scale_inv = stored.granularity.scales(amax)
        self.payload.scale.copy_(scale)
        self.payload.scale_inv.copy_(scale_inv)
        block = stored.granularity.block[0] or 1, stored.granularity.block[1] or shape[-1]
        codes = quantize_part(written, self.payload.scale, self.start, shape[-1], block, E4M3)
        self.shard[: self.num_real].copy_(codes)
