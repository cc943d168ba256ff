"""Ranks as threads of one process: torch's threaded process group, on which collectives take microseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import deepspeed.comm.comm as ds_comm
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch.testing._internal.distributed import multi_threaded_pg as threaded

SECONDS = 60
"""That one call may take."""


class _ReduceScatter(threaded.ReduceScatter):
    """Torch's own with a copy of what is reduced: a rank's output may lie in its input, as gloo and NCCL allow."""

    def work(self, data: Any) -> None:
        super().work([(outputs, [[part.clone() for part in inputs[0]]]) for outputs, inputs in data])


threaded.ReduceScatter = _ReduceScatter


class ThreadBackend(TorchBackend):
    """What deepspeed.comm calls, without a process group of its own."""

    def __init__(self) -> None:
        self.all_gather_function = dist.all_gather_into_tensor
        self.reduce_scatter_function = dist.reduce_scatter_tensor
        self.shm_comm_op = None
        self.initialized = True


def on_threads(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a group whose ranks are threads; return the results by rank.

    `dist` and `deepspeed.comm` work inside. What a test patches is patched for all ranks. A rank's groups end with its
    thread, to which torch's threaded world belongs.
    """
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def rank_main(rank: int, store: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            results[rank] = function(*args)
        except BaseException as error:  # the caller re-raises the first
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    before = ds_comm.cdb
    threaded._install_threaded_pg()
    isolate(True)
    ds_comm.cdb = ThreadBackend()
    try:
        store = dist.HashStore()
        running = [threading.Thread(target=rank_main, args=(rank, store), daemon=True) for rank in range(num_ranks)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(SECONDS)
            assert errors or not thread.is_alive(), "a rank waits for others"
    finally:
        ds_comm.cdb = before
        isolate(False)
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results
