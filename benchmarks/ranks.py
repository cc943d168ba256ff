"""Ranks of a benchmark: processes of this host, each with a GPU of its own, or with gloo on CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results_io import ROOT


def run_on_ranks(work: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """`work(device, *args)` has returned on each of `num_ranks` new processes, which are the default process group.

    Args:
        work: of a module's top level, as its arguments something that pickle takes.

    Raises:
        mp.ProcessRaisedException: `work` raised on a rank; with its traceback.
        mp.ProcessExitedException: a rank's process ended before `work` did.
    """
    sys.path.insert(0, str(ROOT))  # the new processes have it, too
    from fp8_ds.launcher import free_port

    mp.spawn(_run_rank, (num_ranks, free_port(), work, args), nprocs=num_ranks)


def _run_rank(rank: int, num_ranks: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    from processes import leave

    from fp8_ds.device import uses_cuda

    on_cuda = uses_cuda()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    work(device, *args)
    leave()
