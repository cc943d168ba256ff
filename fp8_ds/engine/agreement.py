"""Ranks that act alike on a number which each of them has, without waiting for a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8_ds.engine.log import warn


class RankZeroNumber:
    """A number of the host that steers what all ranks do together: rank 0's counts.

    The host hands it from rank to rank over gloo (a tree: log2 of the ranks); through NCCL the host would wait for all
    that its device has queued. Rank 0 sends and goes on; the others wait for its host, not for any device.

    Args:
        name: of the key that the number steers, for a warning.
        device: of the ranks; anything but a CPU gets a gloo group of its own. Collective.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._has_said = False
        self._group: dist.ProcessGroup | None = None
        if device.type != "cpu" and dist.get_world_size() > 1:
            options = getattr(dist.group.WORLD._get_backend(device), "options", None)  # type: ignore[union-attr]
            self._group = dist.new_group(backend="gloo", timeout=None if options is None else options._timeout)

    def agree(self, own: float) -> float:
        """Rank 0's. Collective over all ranks, at the same point on each."""
        told = torch.tensor([own], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(told, src=0, group=self._group)
        agreed = float(told)
        if agreed != own and not self._has_said:
            self._has_said = True
            warn(
                f"fp8: {self._name}: expected the same number on all ranks, got {own:g} here and {agreed:g} on rank 0, "
                "which decides. Give all ranks one learning rate."
            )
        return agreed

    def close(self) -> None:
        """Its group is gone; idempotent."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
