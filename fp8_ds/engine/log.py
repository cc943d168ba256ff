"""Lines for the user in DeepSpeed's log."""

from __future__ import annotations

from deepspeed import comm as ds_comm
from deepspeed.utils import logger


def say(line: str) -> None:
    """Log a line on rank 0, for what all ranks know."""
    if ds_comm.get_rank() == 0:
        logger.warning(line)


def warn(line: str, rank: int) -> None:
    """Log a line on this rank, for what others do not know. It needs no process group."""
    logger.warning(f"rank {rank}: {line}")
