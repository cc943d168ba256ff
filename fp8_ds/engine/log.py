"""What fp8_ds tells the user, in DeepSpeed's log."""

from __future__ import annotations

from deepspeed import comm as ds_comm
from deepspeed.utils import logger


def say(line: str) -> None:
    """A line from rank 0; what all ranks know."""
    if ds_comm.get_rank() == 0:
        logger.warning(line)


def warn(line: str, rank: int) -> None:
    """A line from this rank, also when the process group is gone; what others do not know."""
    logger.warning(f"rank {rank}: {line}")
