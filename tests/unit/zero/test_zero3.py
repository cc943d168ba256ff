"""FP8 of a ZeRO-3 optimizer as a whole, on stub hosts whose ranks are threads."""

from __future__ import annotations

import pytest
from support.threads import on_threads
from support.zero_hosts import RAGGED, zero_optimizer

from fp8_ds.errors import UnsupportedError


def with_other_masters() -> None:
    zero = zero_optimizer(3, RAGGED)
    zero.fp32_partitioned_groups_flat = list(zero.fp32_partitioned_groups_flat)
    with pytest.raises(UnsupportedError, match="AdamW"):
        zero._post_step(None)


def test_masters_of_other_weights_in_the_middle_of_training_are_refused() -> None:
    """As BAdam makes them, which trains blocks in turns."""
    on_threads(1, with_other_masters)
