"""Lines for the user in the log, and file work that all ranks do together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed import comm as ds_comm

from fp8_ds.errors import CheckpointError
from fp8_ds.log import logger

SLICE_SECONDS = 2.0
"""Time between two exchanges of ranks that wait for each other; far below any time-out of a process group."""
SAY_SECONDS = 60.0
"""Time between two lines that name the ranks which the others wait for."""
_NUM_SHOWN = 3


def say(line: str) -> None:
    """Log a notice on rank 0, for what all ranks know."""
    if ds_comm.get_rank() == 0:
        logger.info(line)


def say_problem(line: str) -> None:
    """Log a warning on rank 0, for what all ranks know."""
    if ds_comm.get_rank() == 0:
        logger.warning(line)


def warn(line: str, rank: int) -> None:
    """Log a warning on this rank, for what others do not know. It needs no process group."""
    logger.warning(f"rank {rank}: {line}")


def tell_all(mine: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Collective over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def all_do(what: str, work: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """Do file work on all ranks, however long one takes. Collective over all ranks.

    NCCL's watchdog ends a process that waits in a collective for the group's time-out. So the work, without collectives
    and a GPU, runs in a thread, and all ranks meet in one short exchange after another until everyone is done.

    Returns:
        (results of `work` by rank, None where it raised; texts of its errors, each once).
    """
    outcome: list[tuple[Any, str]] = []

    def run() -> None:
        try:
            outcome.append((work(), ""))
        except CheckpointError as error:  # names a file, whichever rank has found it
            outcome.append((None, str(error)))
        except BaseException as error:  # the others wait to hear of it
            outcome.append((None, f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}"))

    # A daemon: if the exchange below raises, a peer is gone, and the process must be able to end.
    thread = threading.Thread(target=run, daemon=True, name=f"fp8_ds {what}")
    thread.start()
    start = last_said = time.monotonic()
    while True:
        thread.join(SLICE_SECONDS)
        told = tell_all(tuple(outcome))
        late = [rank for rank, entry in enumerate(told) if not entry]
        if not late:
            break
        if time.monotonic() - last_said > SAY_SECONDS:
            last_said = time.monotonic()
            more = " and others" if len(late) > _NUM_SHOWN else ""
            say_problem(f"fp8: {what}: {last_said - start:.0f} s, and ranks {late[:_NUM_SHOWN]}{more} are not done yet")
    return [entry[0][0] for entry in told], list(dict.fromkeys(entry[0][1] for entry in told if entry[0][1]))
