"""Collectives on FP8 payloads (`group` first) and byte counters."""

from fp8_ds.comm.counter import ByteCounter, CollectiveCount, count_collectives
from fp8_ds.comm.gather import gather_method, gather_runs, gathered_bytes
from fp8_ds.comm.logged import max_reduce
from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8

__all__ = [
    "ByteCounter",
    "CollectiveCount",
    "count_collectives",
    "gather_method",
    "gather_runs",
    "gathered_bytes",
    "max_reduce",
    "reduce_scatter_fp8",
]
