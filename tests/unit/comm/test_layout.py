"""Compact layouts against a map element by element, and the traffic of Llama-3-8B at every group size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import settled

from fp8_ds.comm.gather import FP8_ALIGNMENT, HP_ALIGNMENT, gathered_bytes
from fp8_ds.comm.layout import CompactLayout, ShardRange, compact_layout
from fp8_ds.zero.flat_weights import _HP_FREE_BYTES

Group = tuple[list[int], list[int], int, int, int]
"""starts, numels, partition size, number of ranks, alignment."""


def owners_by_element(layout: CompactLayout, partition_size: int, num_ranks: int) -> dict[int, tuple[int, int]]:
    """Compact position -> (rank, position in that rank's partition), from the flat positions, one at a time."""
    owners = {}
    for in_flat, in_buffer in zip(layout.in_flat, layout.in_buffer, strict=True):
        for element in range(in_buffer.numel):
            flat = in_flat.start + element
            owners[in_buffer.start + element] = (flat // partition_size, flat % partition_size)
    assert all(rank < num_ranks for rank, _ in owners.values())
    return owners


spans = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)


@settled(100)
@given(spans, spans, st.integers(0, 9))
def test_ranges_meet_and_move_as_sets_of_elements_do(one: list[int], other: list[int], offset: int) -> None:
    left, right = ShardRange(*one, rank=3), ShardRange(*other, rank=5)
    shared = left.intersect(right)
    assert set(range(shared.start, shared.stop)) == {*range(*one)} & {*range(*other)}
    assert shared.numel == len({*range(*one)} & {*range(*other)}) and shared.rank == 3
    moved = left.shift(offset)
    assert [*range(moved.start, moved.stop)] == [element + offset for element in range(*one)] and moved.rank == 3
    x = torch.arange(60, dtype=torch.float32).view(2, 30)
    assert moved.narrow(x, 1).equal(x[:, moved.start : moved.stop])


@st.composite
def flat_groups(draw: st.DrawFn) -> Group:
    gaps_and_numels = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=8))
    num_ranks = draw(st.integers(1, 6))
    starts, numels, end = [], [], 0
    for gap, numel in gaps_and_numels:
        starts.append(end + gap)
        numels.append(numel)
        end = starts[-1] + numel
    partition_size = max(1, -(-end // num_ranks)) + draw(st.integers(0, 5))
    return starts, numels, partition_size, num_ranks, draw(st.sampled_from([1, 8, 16]))


@settled(100)
@given(flat_groups())
def test_fragments_and_runs_agree_with_a_map_element_by_element(
    group: tuple[list[int], list[int], int, int, int],
) -> None:
    starts, numels, partition_size, num_ranks, alignment = group
    layout = compact_layout(starts, numels, partition_size, num_ranks, alignment)
    expected = owners_by_element(layout, partition_size, num_ranks)

    from_fragments = {}
    for rank, owned in enumerate(layout.fragments):
        for fragment in owned:
            in_tensor, in_buffer, in_partition = fragment.in_tensor, fragment.in_buffer, fragment.in_partition
            assert 0 < in_tensor.numel == in_buffer.numel == in_partition.numel
            assert in_tensor.rank == in_buffer.rank == in_partition.rank == rank
            assert in_buffer.start == layout.in_buffer[fragment.index].start + in_tensor.start
            for element in range(in_buffer.numel):
                position = in_buffer.start + element
                assert position not in from_fragments
                from_fragments[position] = (rank, in_partition.start + element)
    assert from_fragments == expected

    for rank in range(num_ranks):
        mine = [position for position, (owner, _) in expected.items() if owner == rank]
        runs = [run for run in layout.runs if run.rank == rank]
        assert [(run.start, run.stop) for run in runs] == ([(min(mine), max(mine) + 1)] if mine else [])
    in_runs = [position for run in layout.runs for position in range(run.start, run.stop)]
    assert len(in_runs) == len(set(in_runs)) and set(expected) <= set(in_runs)


@settled(100)
@given(flat_groups())
def test_tensors_are_aligned_ordered_and_dense(group: Group) -> None:
    starts, numels, partition_size, num_ranks, alignment = group
    layout = compact_layout(starts, numels, partition_size, num_ranks, alignment)
    end = 0
    places = zip(layout.in_buffer, layout.in_flat, starts, numels, strict=True)
    for in_buffer, in_flat, flat_start, numel in places:
        assert in_buffer.start % alignment == 0 and end <= in_buffer.start < end + alignment
        assert (in_flat.start, in_flat.numel, in_buffer.numel) == (flat_start, numel, numel)
        end = in_buffer.stop
    assert end <= layout.numel < end + alignment


@settled(100)
@given(flat_groups())
def test_runs_of_a_tensor_cover_it_once(group: Group) -> None:
    starts, numels, partition_size, num_ranks, alignment = group
    layout = compact_layout(starts, numels, partition_size, num_ranks, alignment)
    for index, numel in enumerate(numels):
        runs = layout.runs_of(index)
        assert [element for run in runs for element in range(run.start, run.stop)] == list(range(numel))
        for run in runs:
            assert (starts[index] + run.start) // partition_size == run.rank


def test_rank_that_owns_nothing_has_no_run() -> None:
    layout = compact_layout([100, 120], [20, 7], partition_size=50, num_ranks=4, alignment=16)
    assert [run.rank for run in layout.runs] == [2]
    assert [len(owned) for owned in layout.fragments] == [0, 0, 2, 0]
    assert layout.in_buffer[1].start == 32 and layout.numel == 48


HIDDEN, FFN, KEY_VALUE, VOCABULARY, NUM_LAYERS = 4096, 14336, 1024, 128256, 32
LINEARS = (HIDDEN * HIDDEN, KEY_VALUE * HIDDEN, KEY_VALUE * HIDDEN, HIDDEN * HIDDEN, *(FFN * HIDDEN,) * 3)
DEEPSPEED_ALIGNMENT = 2  # elements a rank: stage_1_and_2.py, nccl_start_alignment_factor


def llama_3_8b() -> tuple[list[int], list[bool]]:
    """Sizes in stock flat order, and which are FP8."""
    tensors = [(VOCABULARY * HIDDEN, False)]
    for _ in range(NUM_LAYERS):
        tensors += [(numel, True) for numel in LINEARS] + [(HIDDEN, False)] * 2
    tensors += [(HIDDEN, False), (VOCABULARY * HIDDEN, False)]
    return [numel for numel, _ in tensors], [is_fp8 for _, is_fp8 in tensors]


def llama_layouts(num_ranks: int) -> tuple[CompactLayout, CompactLayout, int]:
    """(FP8 layout, bf16 layout, all weights) as Fp8ZeroStage12 makes them."""
    numels, is_fp8 = llama_3_8b()
    starts = [sum(numels[:i]) for i in range(len(numels))]
    unit = DEEPSPEED_ALIGNMENT * num_ranks
    partition_size = -(-sum(numels) // unit) * unit // num_ranks

    def layout(wanted: bool, alignment: int) -> CompactLayout:
        chosen = [i for i, here in enumerate(is_fp8) if here == wanted]
        return compact_layout(
            [starts[i] for i in chosen], [numels[i] for i in chosen], partition_size, num_ranks, alignment
        )

    return layout(True, FP8_ALIGNMENT), layout(False, HP_ALIGNMENT), sum(numels)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512])
def test_llama_3_8b_moves_one_byte_per_weight_and_at_most_0_6_of_stock(num_ranks: int) -> None:
    fp8, hp, num_all = llama_layouts(num_ranks)
    assert num_all == 8_030_261_248
    fp8_bytes = gathered_bytes(fp8.runs, num_ranks, 1)
    hp_bytes = gathered_bytes(hp.runs, num_ranks, 2, _HP_FREE_BYTES)
    num_fp8, num_hp = (sum(place.numel for place in layout.in_buffer) for layout in (fp8, hp))
    assert num_fp8 <= fp8_bytes <= 1.05 * num_fp8
    assert 2 * num_hp <= hp_bytes
    assert fp8_bytes + hp_bytes <= 0.6 * 2 * num_all
    assert all(place.start % 16 == 0 for place in fp8.in_buffer)
    assert fp8.numel <= 1.001 * num_fp8  # resident
