"""Parts of weights that tensor-parallel ranks hold: what a checkpoint says of them, and their gather for an export."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import Tensor, nn

from fp8_ds.checkpoint.parts import Layout, Shape, layouts_of
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.fp8_linear import full_shape
from fp8_ds.nn.linear.payload import Granularity
from fp8_ds.tp.group import all_gather
from fp8_ds.tp.linears import contexts_of


def universal_info(module: nn.Module) -> Mapping[str, Any]:
    """Return the entry of the model file by which ds_to_universal.py joins shards; empty for a whole model.

    It has patterns of parameters that are whole on every rank, and of those that are sharded along their input (dim 1);
    all others are sharded along dim 0. Source: deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices (0.19.8).
    """
    if not contexts_of(module):
        return {}
    whole, by_input = [], []
    for name, p in module.named_parameters():
        if p.requires_grad and not getattr(p, "tensor_model_parallel", False):
            whole.append(f"^{re.escape(name)}$")
        elif p.requires_grad and p.partition_dim == 1:  # type: ignore[attr-defined]
            by_input.append(f"^{re.escape(name)}$")
    patterns = {TP_REPLICATED_PARAMETER_PATTERNS: whole, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: by_input}
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {UNIVERSAL_CHECKPOINT_INFO: version | patterns}


class TensorParallelParts:
    """The parts that the ranks of an engine's tensor-parallel group hold; of a whole model there are none.

    Attributes:
        group: the tensor-parallel group; None: the model is whole.
        shapes: of the trainable parameters, by name; of whole ones.
        layouts: how their parts are joined, by name; empty if the model is whole.
        other_ranks: layer plans of the group's other ranks, as own states have them.
    """

    def __init__(self, engine: Any, what: str) -> None:
        """Ask the other ranks for their shapes and plans: collective, and what it raises all ranks raise.

        Raises:
            UnsupportedError: parts cannot be joined, or there are frozen weights.
        """
        module, self._device = engine.module, engine.device
        self.group = _group_of(module)
        self.shapes: dict[str, Shape] = {
            name: tuple(full_shape(p)) for name, p in module.named_parameters() if p.requires_grad
        }
        self.layouts: dict[str, Layout] = {}
        self.other_ranks: list[Mapping[str, Any]] = []
        if self.group is None:
            return
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, (self.shapes, engine.fp8.plan.to_state(), frozen), group=self.group)
        if found := next((frozen for *_, frozen in told if frozen), None):
            raise UnsupportedError(
                f"{what}: expected trained weights only in a model that tensor parallelism shards, got frozen ones "
                f"({found[0]}), of which nothing says how they are joined. Use engine.save_checkpoint and "
                "`fp8-ds convert --to universal`, load that into the whole model, and export there."
            )
        info = getattr(module, UNIVERSAL_CHECKPOINT_INFO, None) or universal_info(module).get(UNIVERSAL_CHECKPOINT_INFO)
        self.layouts = layouts_of(info, [shapes for shapes, *_ in told])
        self.shapes = {name: layout.shape for name, layout in self.layouts.items()}
        own = dist.get_rank(self.group)
        self.other_ranks = [{"plan": plan} for rank, (_, plan, _) in enumerate(told) if rank != own]

    def gather(self, name: str, part: Tensor, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Return what all ranks pass, in its dtype, one byte an element of FP8; what is whole on each is not sent.

        Collective over the group.

        Args:
            name: of a parameter.
            part: of this rank, on any device; of its layout's shape there.
            shapes: of all ranks' parts, if others than the layout's.
        """
        layout = self.layouts.get(name)
        if layout is None or layout.dim is None or self.group is None:
            return [part]
        shapes = layout.part_shapes if shapes is None else shapes
        sizes = [math.prod(shape) * part.element_size() for shape in shapes]
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        own = part.contiguous().view(-1).view(torch.uint8)
        sent[: own.numel()].copy_(own)
        received = sent.new_empty(len(sizes) * sent.numel())
        all_gather(received, sent, group=self.group)
        parts = received.view(len(sizes), -1)
        return [
            parts[rank, :size].view(part.dtype).view(tuple(shape))
            for rank, (size, shape) in enumerate(zip(sizes, shapes, strict=True))
        ]

    def gather_fp8(
        self, name: str, codes: Tensor, scale_inv: Tensor, granularity: Granularity
    ) -> list[tuple[Tensor, Tensor]]:
        """Return (codes, scale_inv) of all ranks, as `gather` does: their scales are not this rank's."""
        if (layout := self.layouts.get(name)) is None:
            return [(codes, scale_inv)]
        grids = [granularity.grid(shape) for shape in layout.part_shapes]
        return list(zip(self.gather(name, codes), self.gather(name, scale_inv, grids), strict=True))


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which `parallelize` or AutoTP has sharded `module`; None: it is whole."""
    found: list[Any] = [tp.group for tp in contexts_of(module)]
    found += [layer.mp_group for layer in module.modules() if isinstance(layer, TensorParallel_Layer)]
    group = next((one for one in found if one is not None), None)
    return None if group is None or dist.get_world_size(group) == 1 else group
