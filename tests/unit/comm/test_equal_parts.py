"""Runs of any sizes and equal parts: what one rank sends is what the other expects, and all of it goes once."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from support.properties import settled

from fp8_ds.comm.gather import equal_parts


@settled(100)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 12))
def test_every_element_in_a_part_goes_from_its_owner_to_the_parts_rank(sizes: list[int], part: int) -> None:
    owned = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    ranks = range(len(sizes))
    into, out_of = zip(*(equal_parts(owned, part, rank) for rank in ranks), strict=True)
    for owner in ranks:
        for rank in ranks:
            expected = len([element for element in owned[owner] if element // part == rank])
            assert into[rank][owner] == out_of[owner][rank] == expected
