"""What fp8_ds tells the user, in DeepSpeed's log."""

from __future__ import annotations

from deepspeed import comm as ds_comm
from deepspeed.utils import logger


def say(line: str) -> None:
    """A line from rank 0; what all ranks know."""
    if ds_comm.get_rank() == 0:
        logger.warning(line)


def warn(line: str, rank: int | None = None) -> None:
    """A line from this rank; what others do not know.

    Args:
        line: what is told.
        rank: this one, of what may be told when the process group is gone; None: the group is asked.
    """
    logger.warning(f"rank {ds_comm.get_rank() if rank is None else rank}: {line}")
