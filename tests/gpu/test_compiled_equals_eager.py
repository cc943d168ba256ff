"""Compiled trains as eager, each step from eager's state, on a GPU: recipes, states, stages, models, modes, features.

The short selection is `-m "gpu and not slow"`, all of it `-m gpu`. A cell takes some 33 s beside an H200, most of it
torch's compiler on the host: all of it took 3 min 46 s with `-n 8 --dist worksteal`, two training runs beside it.
"""

from __future__ import annotations

from typing import Any

import compiled_and_eager as cells
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


NUM_SHORT = 10
"""Of the cells, the first ones, which cover most pairs, are not slow."""
SLOW = [[pytest.mark.slow] if index >= NUM_SHORT else [] for index in range(len(cells.covering_cells()))]


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=marks, id=str(cell)) for cell, marks in zip(cells.covering_cells(), SLOW, strict=True)],
)
def test_compiled_trains_as_eager(gpu_ranks: Any, cell: cells.Cell) -> None:
    ((losses, result),) = gpu_ranks(1).run(cells.compare, cell)
    assert cells.exceeded(result) == [], result
    assert cells.jump(losses) >= cells.JUMP, losses
