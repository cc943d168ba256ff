"""What the ranks of a tensor-parallel group must agree in, checked before anything could hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.errors import ConfigError

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch >= 2.12 renamed it; torch 2.11 has the old name only."""


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors of a check live: NCCL moves nothing that is on the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_row(row: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """int64 [ranks, len(row)] on CPU: what each rank passed. Collective, over all ranks if `group` is None."""
    device = device_of(group)
    mine = torch.tensor(list(row), dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(group) * mine.numel(), dtype=torch.int64, device=device)
    all_gather(everyone, mine, group=group)
    return everyone.view(-1, mine.numel()).cpu()


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Every rank is in the group that it passed, and so are its peers in the same one. Collective over all ranks.

    Args:
        tp_group: of this rank. What `dist.new_group` gives to ranks that it leaves out is found to be none.

    Raises:
        ConfigError: on all ranks, if any rank passed another.
    """
    world = dist.get_world_size()
    members: list[int] = []
    if isinstance(tp_group, dist.ProcessGroup) and dist.get_rank(tp_group) >= 0:
        members = dist.get_process_group_ranks(tp_group)
    rows = gather_row([rank in members for rank in range(world)]).bool()
    outside = [rank for rank in range(world) if not rows[rank, rank]]
    if outside:
        raise ConfigError(
            f"tp_group: expected a group that this rank is in, on every one of {world} ranks, got none on ranks "
            f"{outside}. Make a group for each set of ranks, and pass each rank its own (ParallelGroups does)."
        )
    for rank in range(world):
        for other in rows[rank].nonzero().flatten().tolist():
            if not torch.equal(rows[rank], rows[other]):
                raise ConfigError(
                    f"tp_group: expected ranks {rank} and {other} in the same group, got "
                    f"{rows[rank].nonzero().flatten().tolist()} and {rows[other].nonzero().flatten().tolist()}. "
                    "Groups must not overlap."
                )


def digest(text: str) -> int:
    """63 bits of it, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def check_same(
    what: str,
    texts: Sequence[str],
    group: dist.ProcessGroup,
    *,
    on_all_ranks: bool,
    remedy: str = "Build the same model from the same configuration everywhere.",
) -> None:
    """The ranks of `group` pass the same texts. Collective.

    Args:
        what: they describe, for the message.
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
