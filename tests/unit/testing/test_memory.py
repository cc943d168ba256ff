"""PeakMemory counts what lives, once, and no longer than it lives."""

from __future__ import annotations

import torch
from support.memory import PeakMemory
from torch import nn

KIB = 1024


def test_a_storage_counts_once_and_as_long_as_it_lives_for_autograd_alone_too() -> None:
    with PeakMemory() as memory:
        a, b = (torch.zeros(size * KIB, dtype=torch.uint8) for size in (1, 2))
        assert a.view(2, -1).shape and (memory.live, memory.peak) == (3 * KIB, 3 * KIB)
        del a, b
    assert (memory.live, memory.peak, memory.kinds) == (0, 3 * KIB, {torch.uint8: 3 * KIB})
    weight = nn.Parameter(torch.ones(KIB))
    with PeakMemory([weight]) as memory:
        loss = (weight * 2).exp().sum()  # exp keeps its result for backward
        assert memory.live >= 8 * KIB
        loss.backward()
        del loss
        assert 8 * KIB <= memory.live < 9 * KIB  # weight and gradient
    assert memory.peak >= 12 * KIB
