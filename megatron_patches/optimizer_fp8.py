"""FP8 weights of Transformer Engine (--fp8-param-gather) as the high parts of their masters; no bf16 weight exists.

A weight is a Float8Tensor: uint8 `_data`, which lies in Megatron's parameter buffer, and float32 `_scale_inv` [1]. Our
step writes the bytes of this rank's shards in place, all-gathers move them as Megatron does, and every rank writes
the same power of two into `_scale_inv`. So nothing is cast, and no amax is reduced before the step can end.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import fp8_utils
from torch import Tensor

from fp8_ds.comm.collectives import reduced_amaxes
from fp8_ds.numerics.masters import MasterFormat
from fp8_ds.numerics.new_masters import SplitQuantizer, write_first_codes
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import write_dense, write_first
from megatron_patches import compat
from megatron_patches.optimizer_classes import number_of
from megatron_patches.transposes import without_ours


class Fp8Weights:
    """All FP8 weights of one distributed optimizer, and their scales.

    Args:
        weights: name -> Float8Tensor, the same in all ranks of the group.
        fmt: format of their masters.
        group: ranks that shard them.
        device: that of the weights.
    """

    def __init__(self, weights: dict[str, Any], fmt: MasterFormat, group: Any, device: torch.device) -> None:
        compat.require_private(
            weights.values(),
            _PRIVATE,
            "--fp8-optimizer-states writes FP8 weights by it: use that version, or leave out --fp8-param-gather.",
        )
        self.names = list(weights)
        self.weights = list(weights.values())
        self.group = group
        self.scales = PredictedScales(len(self.weights), device, group)
        self._quantizer = SplitQuantizer(self.scales, fmt)
        self._index = {id(p): index for index, p in enumerate(self.weights)}
        self._loaded: dict[int, tuple[AdamShard, Tensor]] = {}
        self.saved_scales: dict[str, float] = {}

    def index(self, weight: Any) -> int:
        """Return the weight's entry in the scale vectors."""
        return self._index[id(weight)]

    @torch.no_grad()
    def take_values(self, shards: dict[int, AdamShard], seed: int) -> None:
        """Make masters and bytes from the weights as they were initialised, or as they are. Collective.

        Args:
            shards: index -> this rank's shard of that weight.
            seed: seed of the noise that bf16 numbers take (fp8_ds/numerics/new_masters.py).
        """
        device = self.scales.amax.device
        local = [(index, _initial(p).abs().max().view(1)) for index, p in enumerate(self.weights)]
        self.scales.set(reduced_amaxes(self.scales.num, local, self.group, device))
        for index, p in enumerate(self.weights):
            flat = _initial(p).detach().reshape(-1).to(device)  # again, as bf16 of all weights at once is too much
            part = None if index not in shards else flat.narrow(0, shards[index].start, shards[index].numel)
            if _kept(p) is not None and flat.dtype == torch.bfloat16:
                number = number_of(self.names[index], p)
                write_first_codes(p._data.view(-1), flat, self._quantizer.fmt, self.scales, index, seed, number)
                if part is not None:
                    write_first(shards[index], part, self.scales, seed)
            else:
                self._quantizer.quantize_into(p._data.view(-1), flat, index)
                if part is not None:
                    write_dense(shards[index], None, part, self.scales.scale_inv)
            if hasattr(p, "clear_high_precision_init_val"):
                p.clear_high_precision_init_val()
        self.publish()
        without_ours(fp8_utils.post_all_gather_processing)(self.weights)

    def keep(self, shard: AdamShard, value: Tensor) -> None:
        """Keep a loaded master until all are there: their scales follow from all ranks' (`take_loaded`)."""
        self._loaded[shard.scale_index] = shard, value.detach().reshape(-1)

    @torch.no_grad()
    def take_loaded(self) -> None:
        """Make masters of what was kept. Collective; the bytes of other ranks' shards are still to be gathered."""
        sources = [(index, value) for index, (_, value) in self._loaded.items()]
        amaxes = reduced_amaxes(self.scales.num, sources, self.group, self.scales.amax.device)
        saved = torch.tensor([self.saved_scales.get(name, 0.0) for name in self.names], dtype=torch.float32)
        self.scales.set(amaxes, saved)
        for shard, value in self._loaded.values():
            write_dense(shard, None, value, self.scales.scale_inv)
        self._loaded = {}
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give Transformer Engine the scales in force, and void what it derived from the bytes.

        The scales are copied: a checkpoint that is loaded into a weight writes what it likes into `_scale_inv`.
        """
        scale_inv = self.scales.scale_inv
        torch._foreach_copy_([p._scale_inv.view(1) for p in self.weights], list(scale_inv.view(-1, 1).unbind()))
        for p in self.weights:
            p._reset_caches()

    def scale_inv_by_name(self) -> dict[str, float]:
        """Return the inverse scales of all weights, for checkpoints."""
        return dict(zip(self.names, self.scales.scale_inv.tolist(), strict=True))


_PRIVATE = ("_data", "_scale_inv", "_reset_caches")
"""Attributes of Float8Tensor in Transformer Engine 2.11, transformer_engine/pytorch/tensor/float8_tensor.py."""


def _kept(p: Any) -> Tensor | None:
    """Return the value before it was cast to FP8, if Transformer Engine has kept it."""
    return p.get_high_precision_init_val() if hasattr(p, "get_high_precision_init_val") else None


def _initial(p: Any) -> Tensor:
    """Return the value before it was cast to FP8, or else the de-quantised bytes."""
    kept = _kept(p)
    return p.dequantize() if kept is None else kept
