"""Ranks wait for each other's file work, however long it takes, and in no collective for longer than a moment.

A rank that is done with its files would wait in a collective for the others, and NCCL's watchdog ends a process that
waits in one for the group's time-out (10 minutes by default): reading back a large model file from a slow disk takes
longer. So file work runs in a thread, and all ranks meet in one short exchange after another until everyone is done.
A rank that is gone is seen as in any collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fp8_ds.errors import CheckpointError

SLICE_SECONDS = 2.0
"""Between two exchanges; far below any time-out of a process group."""
SAY_SECONDS = 60.0
"""Between two lines that name the ranks which the others wait for."""
_NUM_SHOWN = 3

Say = Callable[[str], None]


def tell_all(mine: Any) -> list[Any]:
    """By rank, what each passed. Collective over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def all_do(what: str, work: Callable[[], Any], say: Say) -> list[Any]:
    """By rank, what `work` returned there. Collective over all ranks.

    Args:
        what: all ranks do, for messages.
        work: this rank's part of it, called in a thread: files, and neither collectives nor a GPU.
        say: called with a line for rank 0.

    Raises:
        CheckpointError: it raised on a rank, on all ranks.
    """
    outcome: list[tuple[Any, str]] = []

    def run() -> None:
        try:
            outcome.append((work(), ""))
        except BaseException as error:  # the others wait to hear of it
            outcome.append((None, f"{type(error).__name__}: {str(error)[:300]}"))

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
            say(f"fp8: {what}: {last_said - start:.0f} s, and ranks {late[:_NUM_SHOWN]}{more} are not done yet")
    failed = [f"rank {rank}: {entry[0][1]}" for rank, entry in enumerate(told) if entry[0][1]]
    if failed:
        raise CheckpointError(
            f"{what}: expected every rank to do its part, got {'; '.join(failed[:_NUM_SHOWN])}. Look at that rank's "
            "file system."
        )
    return [entry[0][0] for entry in told]
