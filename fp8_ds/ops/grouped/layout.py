"""Where the columns of groups lie: arithmetic without tensors."""

from __future__ import annotations

GROUP_BLOCK = 128
"""Columns of a group start at a multiple of this, with zeros behind them: a tile along which a product contracts
belongs to one group, and has no mask."""


def num_columns(num_rows: int, num_groups: int) -> int:
    """Q: a number that groups of altogether `num_rows` rows have at most, whichever row is whose."""
    most = num_rows + (GROUP_BLOCK - 1) * min(num_groups, num_rows)
    return most // GROUP_BLOCK * GROUP_BLOCK if num_groups else 0
