"""Compiled trains as eager, on a CPU: a few cells of tests/gpu/test_compiled_equals_eager.py, and what judges them."""

from __future__ import annotations

import shutil
from typing import Any

import compiled_and_eager as cells
import pytest

pytestmark = pytest.mark.distributed
inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")

Cell = cells.Cell
ON_CPU = [
    Cell("tensorwise", "e4m11", "3 leaf", "mixtral", "compile", "evaluation"),
    Cell("delayed", "e4m19", "1", "qwen2", "reduce-overhead", "accumulation"),
    Cell("rowwise", "fp32", "3", "qwen2", "compile", "checkpointing"),
    Cell("delayed", "fp32", "3 leaf", "mistral", "compile", "resume"),
    Cell("blockwise", "e4m19", "2", "gemma", "compile", "plain"),
    Cell("rowwise_with_gw_hp", "e4m11", "1", "llama", "reduce-overhead", "resume"),
]
"""No GPT-2: torch's LayerNorm (2.13, eager, CPU) adds up its gradients in bf16 and loses up to 0.3 of them."""


@inductor
@pytest.mark.parametrize(
    ("cell", "only_fused"),
    [pytest.param(cells.FIRST, True, id=f"{cells.FIRST}, fused")]
    + [pytest.param(cell, False, id=str(cell), marks=pytest.mark.slow) for cell in ON_CPU],
)
def test_compiled_trains_as_eager(ranks: Any, cell: Cell, only_fused: bool) -> None:
    pytest.importorskip("transformers")
    ((losses, result),) = ranks(1).run(cells.compare, cell, only_fused)
    assert cells.exceeded(result) == [], result
    assert cells.jump(losses) >= cells.JUMP, losses
