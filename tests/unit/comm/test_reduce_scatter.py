"""The arithmetic of the FP8 reduce-scatter, with ranks one after the other or as threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.inputs import MANY_SCALES, many_scales
from support.threads import on_threads
from torch import Tensor

from fp8_ds.comm import reduce_scatter
from fp8_ds.comm.reduce_scatter import (
    GROUP,
    _fill_one,
    _slices,
    block_bytes,
    dequantize_groups,
    is_balanced,
    num_groups,
    pack,
    quantize_groups,
    reduce_scatter_fp8,
    reduce_scatter_fp8_shares,
    unpack_sum,
)
from fp8_ds.numerics.formats import E4M3
from fp8_ds.testing import assert_bitwise, sqnr_db

NUM_RANKS = 8


def reduced(of_ranks: list[list[Tensor]], dtype: torch.dtype = torch.float32, factor: float = 1.0) -> list[Tensor]:
    sizes = [piece.numel() for piece in of_ranks[0]]
    groups = num_groups(sizes)
    blocks = torch.zeros(len(of_ranks), block_bytes(groups), dtype=torch.uint8)
    for block, pieces in zip(blocks, of_ranks, strict=True):
        if groups:
            pack(block[None], groups, pieces[0].dtype, partial(_fill_one, pieces))
    return _slices(unpack_sum(blocks, groups, dtype, factor), sizes)


def gradients(family: str, num_ranks: int = NUM_RANKS, seed: int = 0) -> list[Tensor]:
    """bf16 [96 * 200] per rank: what all share, and noise of about the same size with tails (Student t, 4 degrees)."""
    generator = torch.Generator().manual_seed(seed + 1)
    if family == "normal":  # no few elements that dominate: the hardest for the ratio over all
        return list(torch.randn(num_ranks, 96 * 200, generator=generator).bfloat16())
    shared = many_scales(family, 96, 200, seed)
    found = []
    for _ in range(num_ranks):
        normal = torch.randn(5, *shared.shape, generator=generator)
        noise = normal[0] / (normal[1:].square().sum(0) / 4).sqrt()
        found.append((shared + shared.abs() * noise).bfloat16().flatten())
    return found


def mean(of_ranks: list[Tensor]) -> Tensor:
    return torch.stack(of_ranks).double().mean(0)


# --- one group ---


def test_the_scale_is_the_largest_power_of_two_that_does_not_saturate() -> None:
    eps = 2.0**-8
    amax = torch.tensor([448.0, 448 * (1 + eps), 447.0, 1.75, 1.75 * (1 + eps), 1.0, 3e-30, 2.0**-117, 1e38])
    x = torch.zeros(len(amax), GROUP)
    x[:, 5] = -amax
    codes, exponents = quantize_groups(x)
    used = amax / torch.exp2(exponents.float() - 127)
    assert bool((used <= 448).all()) and bool((used * 2 > 448).all())
    assert bool((codes.float().abs() <= 448).all())
    assert exponents[:2].tolist() == [127, 128]


def test_each_value_becomes_the_nearest_one_of_e4m3() -> None:
    x = many_scales("per_tile", 64, GROUP).bfloat16().float()
    codes, exponents = quantize_groups(x)
    every_code = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).float()
    values = every_code[every_code.isfinite()]
    grid = values[None] * torch.exp2(exponents.float() - 127)[:, None]
    nearest = (x[:, :, None] - grid[:, None, :]).abs().amin(2)
    assert torch.equal((x - dequantize_groups(codes, exponents)).abs(), nearest)


def test_zeros_and_subnormals_keep_their_values() -> None:
    x = torch.zeros(3, GROUP)
    x[1, 0], x[1, 1] = 2.0**-133, -(2.0**-130)  # the smallest of bf16, and another subnormal
    x[2, 0] = 2.0**-126
    codes, exponents = quantize_groups(x)
    assert torch.equal(dequantize_groups(codes, exponents), x)


@pytest.mark.parametrize("broken", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinity_and_nan_break_their_group_and_no_other(broken: float, dtype: torch.dtype) -> None:
    of_ranks = [[grad] for grad in gradients("per_row", 3)]
    sound = reduced(of_ranks, dtype)[0]
    of_ranks[1][0] = of_ranks[1][0].clone()
    of_ranks[1][0][GROUP + 7] = broken
    found = reduced(of_ranks, dtype)[0]
    group = slice(GROUP, 2 * GROUP)
    assert not bool(found[group].isfinite().any())
    found[group] = sound[group]
    assert_bitwise(found, sound)


# --- the sum ---


@pytest.mark.parametrize("family", ["normal", *MANY_SCALES])
def test_average_over_8_ranks_is_28_db_above_its_error(family: str) -> None:
    of_ranks = gradients(family)
    exact = mean(of_ranks)
    averages = {dtype: reduced([[g] for g in of_ranks], dtype, 1 / 8)[0] for dtype in (torch.float32, torch.bfloat16)}
    for dtype, average in averages.items():
        assert average.dtype == dtype
        assert sqnr_db(exact, average) >= 28, dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_the_number_of_micro_batches(dtype: torch.dtype) -> None:
    sums, exact, found = torch.zeros(96 * 200, dtype=dtype), torch.zeros(96 * 200, dtype=torch.float64), {}
    for micro_batch in range(16):
        of_ranks = gradients("normal", seed=100 * micro_batch)
        exact += mean(of_ranks)
        sums += reduced([[g] for g in of_ranks], dtype, 1 / 8)[0]
        found[micro_batch + 1] = sqnr_db(exact, sums)
    assert min(found[1], found[4], found[16]) >= 28
    assert found[4] > found[1] - 0.5 and found[16] > found[1] - 0.5


def test_result_does_not_depend_on_which_rank_held_what() -> None:
    of_ranks = gradients("per_column")
    # Ranges that differ between ranks by up to 2**21, other ranks leading in each group.
    powers = torch.randint(-21, 1, (NUM_RANKS, 150), generator=torch.Generator().manual_seed(3))
    of_ranks = [(g.view(150, GROUP) * torch.exp2(p)[:, None]).flatten() for g, p in zip(of_ranks, powers, strict=True)]
    first = reduced([[g] for g in of_ranks], torch.float32, 1 / 8)[0]
    in_float32 = set()
    for seed in range(5):
        order = torch.randperm(NUM_RANKS, generator=torch.Generator().manual_seed(seed)).tolist()
        assert_bitwise(reduced([[of_ranks[i]] for i in order], torch.float32, 1 / 8)[0], first)
        total = torch.zeros_like(first)
        for i in order:
            total += reduced([[of_ranks[i]]])[0]
        in_float32.add(tuple(total.tolist()))
    assert len(in_float32) > 1  # so this input does tell orders apart


def test_addends_are_added_exactly() -> None:
    of_ranks = gradients("outlier_channel", 3)
    added = sum(reduced([[g]])[0].double() for g in of_ranks)
    assert_bitwise(reduced([[g] for g in of_ranks], torch.float32, 1 / 3)[0], (added * (1 / 3)).float())


# --- pieces and blocks ---

SIZES = [0, 1, 127, 128, 129, 0, 1000, 5]


def test_every_piece_begins_a_group_of_its_own() -> None:
    of_ranks = [[g[:n] * 1e-6 ** (i % 2) for i, n in enumerate(SIZES)] for g in gradients("per_tile", 4)]
    together = reduced(of_ranks, torch.float32, 1 / 4)
    assert [piece.numel() for piece in together] == SIZES
    for i, piece in enumerate(together):
        assert_bitwise(piece, reduced([[pieces[i]] for pieces in of_ranks], torch.float32, 1 / 4)[0])


def test_ranks_share_the_adding_where_few_keep_the_sums() -> None:
    def balanced(*numels: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return is_balanced([num_groups([numel]) for numel in numels], dtype)

    bucket = 1 << 22
    for num_ranks in (2, 3, 4, 8, 16):
        assert not balanced(*[bucket // num_ranks] * num_ranks)  # already equal
    assert balanced(*[bucket // 17] * 17)  # as much for each, but in 17 packs
    assert not balanced(bucket, 0) and not balanced(0, bucket, 0)
    assert balanced(0, 0, bucket, 0) and not balanced(0, 0, bucket, 0, dtype=torch.float32)
    assert balanced(*[0] * 7, bucket) and balanced(*[0] * 480, *[bucket // 32] * 32, dtype=torch.float32)
    assert not balanced(0, 0)


def test_a_block_takes_1_01_bytes_an_element_and_blocks_stay_aligned() -> None:
    assert block_bytes(num_groups([1 << 20])) / (1 << 20) < 1.008
    assert all(block_bytes(n) % 16 == 0 and block_bytes(n) >= n * (GROUP + 1) for n in range(100))


# --- on ranks ---

# Sizes of the pieces for each destination: uneven, empty, and a rank that is sent nothing.
PIECES = [[130, 0, 1], [], [1000, 127], [128, 5, 300]]


def pieces_of(owner: int, world: int) -> list[list[Tensor]]:
    """What `owner` has for each rank; each piece in a range of its own."""
    flat = many_scales("per_row", 16, 200, seed=owner).bfloat16().flatten()
    return [[flat.narrow(0, 7 * i, n) * 10.0 ** (-3 * i) for i, n in enumerate(sizes)] for sizes in PIECES[:world]]


def exchange(owners: list[int], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], int]:
    """(sums, bytes) of this rank, which brings what belongs to `owners[rank]`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return reduce_scatter_fp8(dist.group.WORLD, pieces_of(owners[rank], world), dtype, 1 / world)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_to_alls_carry_uneven_and_empty_pieces(
    monkeypatch: pytest.MonkeyPatch, world_size: int, balanced: bool
) -> None:
    monkeypatch.setattr(reduce_scatter, "is_balanced", lambda *_: balanced)
    owners = list(range(world_size))
    results = on_threads(world_size, exchange, owners)
    swapped = on_threads(world_size, exchange, owners[::-1])
    in_bf16 = on_threads(world_size, exchange, owners, torch.bfloat16)
    monkeypatch.setattr(reduce_scatter, "_CHUNK_GROUPS", 3)
    in_chunks = on_threads(world_size, exchange, owners)
    groups = [num_groups(sizes) for sizes in PIECES[:world_size]]
    part = -(-sum(groups) // world_size)
    for rank, (sums, num_bytes) in enumerate(results):
        if balanced:
            to_add = [k for k in range(part * rank, part * (rank + 1)) if k < sum(groups)]
            assert num_bytes == world_size * block_bytes(part) + len(to_add) * GROUP * 4
        else:
            assert num_bytes == sum(map(block_bytes, groups))
        of_owners = [pieces_of(owner, world_size)[rank] for owner in owners]
        expected = reduced(of_owners, factor=1 / world_size)
        assert [piece.numel() for piece in sums] == PIECES[rank]
        for k, (piece, same) in enumerate(zip(sums, expected, strict=True)):
            assert_bitwise(piece, same)
            assert_bitwise(swapped[rank][0][k], same)  # whichever rank held what
            assert_bitwise(in_bf16[rank][0][k], same.bfloat16())
            assert_bitwise(in_chunks[rank][0][k], same)


def shares(numels: list[int]) -> tuple[list[Tensor], list[Tensor], int]:
    """What `reduce_scatter_fp8_shares` gives, what `reduce_scatter_fp8` gives of the same, and the bytes of both."""
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = many_scales("per_row", 16, 200, seed=rank).bfloat16().flatten()
    tensors = [flat.narrow(0, 3 * i, numel) * 10.0**-i for i, numel in enumerate(numels)]
    pieces: list[list[Tensor]] = [[] for _ in range(world)]
    for tensor in tensors:
        share = -(-tensor.numel() // world)
        for destination, of_rank in enumerate(pieces):
            start = min(destination * share, tensor.numel())
            of_rank.append(tensor.narrow(0, start, min(share, tensor.numel() - start)))
    sums, num_bytes = reduce_scatter_fp8_shares(dist.group.WORLD, tensors, torch.float32, 1 / world)
    other, _ = reduce_scatter_fp8(dist.group.WORLD, pieces, torch.float32, 1 / world)
    return sums, other, num_bytes


@pytest.mark.parametrize("chunk", [1 << 16, 7, 1])
@pytest.mark.parametrize("numels", [[1000, 3, 0, 128, 2051], [1], [0], []], ids=str)
def test_equal_shares_have_the_bits_of_pieces_rank_by_rank(
    monkeypatch: pytest.MonkeyPatch, numels: list[int], chunk: int
) -> None:
    monkeypatch.setattr(reduce_scatter, "_CHUNK_GROUPS", chunk)
    for rank, (sums, other, num_bytes) in enumerate(on_threads(3, shares, numels)):
        assert num_bytes == 3 * block_bytes(num_groups([-(-numel // 3) for numel in numels]))
        assert [piece.numel() for piece in sums] == [
            max(0, min(-(-numel // 3), numel - rank * -(-numel // 3))) for numel in numels
        ]
        for piece, same in zip(sums, other, strict=True):
            assert_bitwise(piece, same)
