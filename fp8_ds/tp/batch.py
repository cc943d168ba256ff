"""What the ranks of a tensor-parallel group bring to a forward, compared where it enters the layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.host_copy import HostCopy
from fp8_ds.tp.graph import untraced
from fp8_ds.tp.group import check_same, digest

SAME_BATCHES = (
    "Give all ranks of a tensor-parallel group the same batches, and the same seed where a model has dropout before "
    "its blocks, or, without sequence parallelism, anywhere but on a rank's own heads and features."
)


def shape_text(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def fingerprint(x: Tensor) -> str:
    """Of its bits: another element gives another one."""
    return _digest(_sums(x).cpu())


def _sums(x: Tensor) -> Tensor:
    """int32 [tokens]: the bits of each token's channels, added up."""
    channels = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)
    return channels.view(torch.int32 if x.element_size() == 4 else torch.int16).sum(-1, dtype=torch.int32)


def _digest(sums: Tensor) -> str:
    return f"{digest(sums.numpy().tobytes().hex()):016x}"


class BatchCheck:
    """Ranks go on together with the same tokens, or all of them raise.

    One all-gather of 16 bytes a rank for each forward, from host to host (gloo), before anything travels whose size
    hangs on the batch. No host waits for its GPU: there, values are compared a forward late.

    Args:
        group: whose ranks bring the same tensor.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._host_group: dist.ProcessGroup | None = None
        self._sent: HostCopy | None = None

    @untraced
    def __call__(self, x: Tensor) -> None:
        """Collective. On CUDA with the values of the forward before.

        Args:
            x: what all ranks have.

        Raises:
            ConfigError: on all ranks of the group, if one has another.
        """
        if self._host_group is None:
            self._host_group = host_group(self._group)
        texts = [shape_text(x), self._values(x)]
        check_same("batch", texts, self._host_group, on_all_ranks=False, remedy=SAME_BATCHES)

    def _values(self, x: Tensor) -> str:
        if not x.is_cuda:
            return f"values {fingerprint(x)}"
        before, sums = "none", _sums(x)
        if self._sent is not None:
            before = _digest(self._sent.read())  # sent a forward ago
        self._sent = HostCopy(sums)  # a new one: batches differ in size
        self._sent.send(sums)
        return f"values of the batch before {before}"


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """`group` if it is gloo's; else one of the same ranks that is. Collective over these."""
    if dist.get_backend(group) == "gloo":
        return group
    return new_host_group(group)


def new_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Over gloo, of the ranks of `group`, which alone call this."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None) if torch.cuda.is_available() else None
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=None if options is None else options._timeout,
        backend="gloo",
        use_local_synchronization=True,
    )
    return made
