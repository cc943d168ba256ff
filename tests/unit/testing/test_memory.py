"""PeakMemory counts what lives, once, and no longer than it lives."""

from __future__ import annotations

import torch
from support.memory import PeakMemory
from torch import nn

KIB = 1024


def test_peak_is_the_largest_sum_of_live_storages() -> None:
    with PeakMemory() as memory:
        a = torch.zeros(KIB, dtype=torch.uint8)
        b = torch.zeros(2 * KIB, dtype=torch.uint8)
        assert (memory.live, memory.peak) == (3 * KIB, 3 * KIB)
        del a
        assert memory.live == 2 * KIB
        c = torch.zeros(KIB // 2, dtype=torch.uint8)
        del b, c
    assert (memory.live, memory.peak) == (0, 3 * KIB)
    assert memory.kinds == {torch.uint8: 3 * KIB}


def test_tensor_kept_by_autograd_only_is_live() -> None:
    weight = nn.Parameter(torch.ones(KIB))
    with PeakMemory([weight]) as memory:
        assert memory.live == 4 * KIB
        loss = (weight * 2).exp().sum()  # exp keeps its result for backward
        assert memory.live >= 8 * KIB
        loss.backward()
        del loss
        assert 8 * KIB <= memory.live < 9 * KIB  # weight and gradient
    assert memory.peak >= 12 * KIB
