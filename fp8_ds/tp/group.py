"""Groups of ranks that share a model or data, and checks that those that share a model agree.

They compare, before anything could hang, the group, texts that describe what ranks have built, and what these bring to
a forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy
from fp8_ds.errors import ConfigError

SAME_BATCHES = (
    "Give all ranks of a tensor-parallel group the same batches, and the same seed where a model has dropout before "
    "its blocks, or, without sequence parallelism, anywhere but on a rank's own heads and features."
)

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch >= 2.12 renamed it; torch 2.11 has the old name only."""


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for small tensors of a check: NCCL moves nothing that is on the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_row(row: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather what each rank passed, int64 [ranks, len(row)] on CPU. Collective, over all ranks if `group` is None."""
    device = device_of(group)
    mine = torch.tensor(list(row), dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(group) * mine.numel(), dtype=torch.int64, device=device)
    all_gather(everyone, mine, group=group)
    return everyone.view(-1, mine.numel()).cpu()


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Check that every rank is in the group that it passed, and its peers in the same one. Collective over all ranks.

    Args:
        tp_group: this rank's. What `dist.new_group` gives to ranks that it leaves out counts as none.

    Raises:
        ConfigError: on all ranks, if any rank passed another.
    """
    world = dist.get_world_size()
    members: list[int] = []
    if isinstance(tp_group, dist.ProcessGroup) and dist.get_rank(tp_group) >= 0:
        members = sorted(dist.get_process_group_ranks(tp_group))
    everyone: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, members)
    if outside := [rank for rank, ranks in enumerate(everyone) if rank not in ranks]:
        raise ConfigError(
            f"tp_group: expected a group that this rank is in, on every one of {world} ranks, got none on ranks "
            f"{outside}. Make a group for each set of ranks, and pass each rank its own (ParallelGroups does)."
        )
    for rank, ranks in enumerate(everyone):
        for other in ranks:
            if everyone[other] != ranks:
                raise ConfigError(
                    f"tp_group: expected ranks {rank} and {other} in the same group, got {ranks} and "
                    f"{everyone[other]}. Groups must not overlap."
                )


def digest(text: str) -> int:
    """Return a hash of 63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def check_same(
    what: str,
    texts: Sequence[str],
    group: dist.ProcessGroup,
    *,
    on_all_ranks: bool,
    remedy: str = "Build the same model from the same configuration everywhere.",
) -> None:
    """Check that the ranks of `group` pass the same texts. Collective.

    Args:
        what: the thing that they describe, for the message.
        texts: the same number on all ranks of `group`, or the first difference is the number.
        group: of ranks that must agree.
        on_all_ranks: all ranks of the world call this, each with its group, and all fail if one group disagrees.
        remedy: the end of the message.

    Raises:
        ConfigError: on all ranks that call, naming what differs first where it is in this rank's group.
    """
    rows = gather_row([len(texts), digest("\n".join(texts))], group)
    agree = bool((rows == rows[0]).all())
    all_agree = agree
    if on_all_ranks:
        all_agree = bool(gather_row([agree]).all())
    if all_agree:
        return
    if agree:
        raise ConfigError(f"{what}: expected the same on all ranks of a group, got others in another group.")
    gathered: list[list[str]] = [[] for _ in range(len(rows))]
    dist.all_gather_object(gathered, list(texts), group=group)
    raise ConfigError(f"{what}: expected the same on all ranks of a group, got {_first_difference(gathered)}. {remedy}")


def _first_difference(gathered: list[list[str]]) -> str:
    ranks = range(len(gathered))
    other = next(rank for rank in ranks if gathered[rank] != gathered[0])
    for here, there in zip(gathered[0], gathered[other], strict=False):
        if here != there:
            return f"{here!r} on rank 0 of the group and {there!r} on rank {other}"
    return f"{len(gathered[0])} entries on rank 0 of the group and {len(gathered[other])} on rank {other}"


def shape_text(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def fingerprint(x: Tensor) -> str:
    """Return a digest of the bits: another element gives another one."""
    return _digest(_sums(x).cpu())


def _sums(x: Tensor) -> Tensor:
    """Add up the bits of each token's channels, int32 [tokens]."""
    channels = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)
    return channels.view(torch.int32 if x.element_size() == 4 else torch.int16).sum(-1, dtype=torch.int32)


def _digest(sums: Tensor) -> str:
    return f"{digest(sums.numpy().tobytes().hex()):016x}"


class BatchCheck:
    """Check that ranks go on together with the same tokens; else all of them raise.

    It is one all-gather of 16 bytes a rank for each forward, from host to host (gloo), before anything travels whose
    size depends on the batch. No host waits for its GPU: there, values are compared a forward late.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._host_group: dist.ProcessGroup | None = None
        self._sent: HostCopy | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> None:
        """Compare `x`, on CUDA the values of the forward before. Collective; raises ConfigError on all ranks."""
        if self._host_group is None:
            is_gloo = dist.get_backend(self._group) == "gloo"
            self._host_group = self._group if is_gloo else new_host_group(self._group)
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


def new_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of `group`, which alone call this."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None) if torch.cuda.is_available() else None
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=None if options is None else options._timeout,
        backend="gloo",
        use_local_synchronization=True,
    )
    return made


class ParallelGroups:
    """Groups of neighbouring ranks, which share a model, and of ranks at equal places in it, which share data.

    With 4 ranks and 2 of tensor parallelism: tensor-parallel (0, 1) and (2, 3), data-parallel (0, 2) and (1, 3). Make
    it on all ranks alike, for `deepspeed.initialize(..., mpu=groups)`.

    Raises:
        ConfigError: the number of ranks is no multiple of `tp_size`.
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
