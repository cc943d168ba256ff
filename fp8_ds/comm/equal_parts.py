"""What goes from ranks that own uneven runs of a whole to ranks that each take an equal part of it, or back; and equal
shares of tensors."""

from __future__ import annotations

from collections.abc import Sequence


def equal_parts(owned: Sequence[range], part: int, rank: int) -> tuple[list[int], list[int]]:
    """How much of whose run lies in whose part.

    Args:
        owned: each rank's run of the whole, empty for a rank that owns nothing.
        part: size of a part; rank k has `[k * part, (k + 1) * part)`, and what lies behind all parts nobody.
        rank: this one.

    Returns:
        (of each rank's run what lies in this rank's part, of this rank's run what lies in each rank's part).
    """
    parts = [range(k * part, (k + 1) * part) for k in range(len(owned))]
    return [_shared(run, parts[rank]) for run in owned], [_shared(owned[rank], other) for other in parts]


def _shared(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def equal_shares(numels: Sequence[int], num_ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """As ZeRO-3 cuts tensors of so many elements: (each one's share, what this rank has of it, less at the end)."""
    shares = [-(-numel // num_ranks) for numel in numels]
    return shares, [max(0, min(share, numel - rank * share)) for numel, share in zip(numels, shares, strict=True)]
