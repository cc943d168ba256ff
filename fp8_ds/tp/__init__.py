"""Tensor parallelism whose activations travel in FP8: docs/tensor-parallel.md."""

from fp8_ds.tp.context import TensorParallel
from fp8_ds.tp.group import ParallelGroups
from fp8_ds.tp.linears import (
    ColumnParallelFp8Linear,
    ColumnParallelLinear,
    RowParallelFp8Linear,
    RowParallelLinear,
)
from fp8_ds.tp.plan import LLAMA, QWEN3, TensorParallelPlan, configure, parallelize

__all__ = [
    "LLAMA",
    "QWEN3",
    "ColumnParallelFp8Linear",
    "ColumnParallelLinear",
    "ParallelGroups",
    "RowParallelFp8Linear",
    "RowParallelLinear",
    "TensorParallel",
    "TensorParallelPlan",
    "configure",
    "parallelize",
]
