"""Arguments that no kernel takes are refused on every device, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam_shards import make_shard
from support.producers import make_scaling

from fp8_ds.numerics.formats import E4M3, E4M4, E5M2
from fp8_ds.numerics.masters import E4M11
from fp8_ds.ops.adamw import prepare
from fp8_ds.ops.align import align
from fp8_ds.ops.blockwise import (
    dequantize_groupwise,
    quantize_blockwise,
    quantize_groupwise,
    shard_block_amax,
    transpose_blockwise,
)
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise
from fp8_ds.ops.grouped import columns, rows_by_matrices
from fp8_ds.ops.quantize import quantize, quantize_and_transpose_tensorwise, quantize_colwise_t, quantize_rowwise
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart
from fp8_ds.ops.rmsnorm import rmsnorm, rmsnorm_backward
from fp8_ds.ops.swiglu import swiglu, swiglu_backward, swiglu_backward_and_columns, swiglu_columns
from fp8_ds.ops.transpose import transpose
from fp8_ds.ops.weighted_sum import weighted_sum

BF16, ONE, ROWS = torch.bfloat16, torch.ones(()), (1, 128)
X = torch.ones(4, 6)
X_BF16, X_FP8 = X.to(BF16), X.to(E4M3.dtype)
A = torch.ones(16, 16).to(E4M3.dtype)
BLOCKS = torch.ones(16, 1)
ENDS = torch.tensor([16], dtype=torch.int32)
PART = QuantizePart(torch.zeros(8), torch.zeros(8, dtype=E4M3.dtype), ONE)
GIVEN = make_scaling("given")


def shards_of_two_devices() -> list[Any]:
    shards = [make_shard(E4M11, 8, 0) for _ in range(2)]
    shards[1].hi = shards[1].hi.to("meta")
    return shards


CASES: list[tuple[str, Callable[[], Any]]] = [
    ("e4m4", lambda: quantize(X, ONE, E4M4)),
    ("scale:", lambda: quantize(X, ONE.double(), E4M3)),
    ("layout:", lambda: quantize_and_transpose_tensorwise(X, E4M3, "rows")),
    ("x:", lambda: quantize_and_transpose_tensorwise(X.t(), E4M3, "both")),
    ("x:", lambda: quantize_rowwise(X.double(), E4M3)),
    ("fold:", lambda: quantize_rowwise(X, E4M3, torch.ones(4))),
    ("fold:", lambda: quantize_colwise_t(X, E4M3, torch.ones(1, 4))),
    ("x:", lambda: MultiTensorQuantize([PART._replace(x=torch.zeros(16)[::2])], E4M3)),
    ("out:", lambda: MultiTensorQuantize([PART], E5M2)),
    ("grid:", lambda: MultiTensorQuantize([PART._replace(grid=torch.ones(1, 1), num_cols=4, block=(1, 4))], E4M3)),
    ("e4m4", lambda: quantize_blockwise(X, E4M4, ROWS, "row")),
    (r"got \(128, 1\)", lambda: quantize_blockwise(X, E4M3, (128, 1), "row")),
    ("layout:", lambda: quantize_blockwise(X, E4M3, ROWS, "rows")),
    ("float64", lambda: quantize_blockwise(X.double(), E4M3, ROWS, "row")),
    ("x_fp8:", lambda: transpose_blockwise(X, torch.ones(4, 1))),
    ("expected float32", lambda: transpose_blockwise(X_FP8, torch.ones(1, 1))),
    (r"\[22, 26\)", lambda: shard_block_amax(torch.ones(4), 22, (4, 6), ROWS)),
    ("x_fp8:", lambda: dequantize_groupwise(X_FP8.t(), torch.ones(6, 1))),
    ("scale_inv:", lambda: dequantize_groupwise(X_FP8, torch.ones(4, 2))),
    ("E4M3", lambda: scaled_mm(A.view(E5M2.dtype), A.view(E5M2.dtype), ONE, ONE, BF16)),
    ("float8", lambda: scaled_mm(A.float(), A, ONE, ONE, BF16)),
    (r"\[M, K\]", lambda: scaled_mm(A, A[:, :8], ONE, ONE, BF16)),
    ("out_dtype", lambda: scaled_mm(A, A, ONE, ONE, torch.float64)),
    ("backend", lambda: scaled_mm(A, A, ONE, ONE, BF16, "te")),
    ("a_fp8, b_fp8:", lambda: scaled_mm_blockwise(A.float(), A, BLOCKS, BLOCKS, BF16)),
    (r"\[M, K\]", lambda: scaled_mm_blockwise(A, A[:, :8], BLOCKS, BLOCKS, BF16)),
    ("scale_inv_a:", lambda: scaled_mm_blockwise(A, A, BLOCKS[1:], BLOCKS, BF16)),
    ("scale_inv_b:", lambda: scaled_mm_blockwise(A, A, BLOCKS, BLOCKS[3:], BF16)),
    ("out_dtype", lambda: scaled_mm_blockwise(A, A, BLOCKS, BLOCKS, torch.float64)),
    ("a_fp8, b_fp8:", lambda: rows_by_matrices(A.view(E5M2.dtype), A.view(E5M2.dtype)[None], ENDS, ONE, ONE, BF16)),
    ("contiguous", lambda: rows_by_matrices(A, A.t()[None], ENDS, ONE, ONE, BF16)),
    ("multiple of 16", lambda: rows_by_matrices(A[:, :8].contiguous(), A[None, :, :8], ENDS, ONE, ONE, BF16)),
    ("ends:", lambda: rows_by_matrices(A, A[None], ENDS.long(), ONE, ONE, BF16)),
    ("one-byte", lambda: columns(X, ENDS)),
    ("one-byte", lambda: transpose(X_FP8.t())),
    (r"\[T k, C\]", lambda: weighted_sum(X, torch.arange(3), torch.ones(2, 2), BF16)),
    ("contiguous", lambda: weighted_sum(X.t().contiguous().t(), torch.arange(4), torch.ones(2, 2), BF16)),
    ("x_fp8:", lambda: align(X_FP8.t(), torch.ones(6))),
    ("scale_inv:", lambda: align(X_FP8, torch.ones(3))),
    ("x:", lambda: rmsnorm(X, X[0], 1e-5, E4M3, "rowwise")),
    ("32769", lambda: rmsnorm(torch.ones(2, 32769).to(BF16), X[0], 1e-5, E4M3, "rowwise")),
    ("weight:", lambda: rmsnorm(X_BF16, X[0, 1:], 1e-5, E4M3, "rowwise")),
    ("scaling:", lambda: rmsnorm(X_BF16, X[0], 1e-5, E4M3, "delayed")),  # type: ignore[arg-type]
    ("rounding:", lambda: rmsnorm(X_BF16, X[0], 1e-5, E4M3, "rowwise", rounding="hf")),  # type: ignore[arg-type]
    ("grad_output:", lambda: rmsnorm_backward(X_BF16[1:], X_BF16, X[0], torch.ones(4))),
    ("rstd:", lambda: rmsnorm_backward(X_BF16, X_BF16, X[0], torch.ones(3))),
    ("gate:", lambda: swiglu(X, X_BF16, E4M3, "rowwise")),
    ("up:", lambda: swiglu(X_BF16, X_BF16[1:], E4M3, "rowwise")),
    ("grad_hidden:", lambda: swiglu_backward(X_BF16[:, 1:], X_BF16, X_BF16)),
    ("up:", lambda: swiglu_columns(quantize_groupwise(X_BF16), X_BF16, E4M3, "tensorwise")),
    ("AmaxSlots", lambda: swiglu_columns(X_BF16, X_BF16, E4M3, "rowwise")),
    (
        "AmaxSlots",
        lambda: swiglu_backward_and_columns(X_BF16, X_BF16, X_BF16, (E4M3, E5M2), (GIVEN, GIVEN, "tensorwise")),
    ),
    ("one device", lambda: prepare(shards_of_two_devices())),
]


@pytest.mark.parametrize(("match", "call"), CASES, ids=[f"{number}-{match}" for number, (match, _) in enumerate(CASES)])
def test_other_arguments_are_refused_by_name(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=match):
        call()
