"""ZeRO-3's gradients are cut for all ranks as DeepSpeed cuts them, bit for bit, copied or sent from where they lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from support.threads import on_threads

from fp8_ds.comm import collectives
from fp8_ds.comm.reduce_scatter import reduce_scatter_shares
from fp8_ds.testing import assert_bitwise

COPIED, SENT_EACH = 2**20, 0


def both_ways(numels: list[int], dtype: torch.dtype, owned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """DeepSpeed's shares and ours of the same tensors; how many of ours lie where a tensor that was handed in does."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [(4 * torch.randn(numel, generator=generator)).round().to(dtype) for numel in numels]  # exact sums
    stock = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], dist.group.WORLD)
    ours = reduce_scatter_shares(tensors, dist.group.WORLD, owned=owned)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return stock, ours, sum(one.untyped_storage().data_ptr() in storages for one in ours if one.numel())


@pytest.mark.parametrize("min_bytes", [COPIED, SENT_EACH], ids=["copied", "sent each"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "numels",
    [[12], [13], [1], [6, 18, 600], [1000, 3, 1, 128, 2051, 5], [8, 12, 4], [2, 0, 5], [0, 0], [0, 16]],
    ids=lambda one: "-".join(map(str, one)),
)
def test_shares_have_deepspeeds_bits(
    monkeypatch: pytest.MonkeyPatch, world_size: int, numels: list[int], min_bytes: int
) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", min_bytes)
    used = [numel for numel in numels if numel]
    is_one = len(used) == 1 and used[0] % world_size == 0
    for dtype, owned in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
        for stock, ours, num_in_place in on_threads(world_size, both_ways, numels, dtype, owned):
            assert len(stock) == len(ours) == len(numels)
            for one, other in zip(stock, ours, strict=True):
                assert_bitwise(one, other)
            assert num_in_place == (len(used) if world_size == 1 else owned and is_one)


def place_of(kind: str, numel: int) -> torch.Tensor | None:
    """Of a share of `numel` elements in bf16."""
    if kind == "none":
        return None
    if kind == "odd":  # no multiple of 16 bytes, at which NCCL would be slow
        return torch.zeros(numel + 1, dtype=torch.bfloat16)[1:]
    if kind == "long":  # with room for padding
        numel += 1
    return torch.zeros(numel, dtype=torch.float32 if kind == "float32" else torch.bfloat16)


def into_places(kinds: list[tuple[int, str]]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[bool]]:
    """DeepSpeed's shares and ours with a place for each; which of ours are at theirs."""
    tensors = [torch.arange(numel, dtype=torch.bfloat16).mul(dist.get_rank() + 1) for numel, _ in kinds]
    stock = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], dist.group.WORLD)
    places = [place_of(kind, -(-numel // dist.get_world_size())) for numel, kind in kinds]
    ours = reduce_scatter_shares(tensors, dist.group.WORLD, places)
    assert all(one.dtype == torch.bfloat16 for one in ours)
    is_at = [place is not None and place.data_ptr() == own.data_ptr() for place, own in zip(places, ours, strict=True)]
    return stock, ours, is_at


ALL_KINDS = [(16, "bf16"), (12, "bf16"), (9, "bf16"), (8, "odd"), (32, "float32"), (64, "none"), (24, "long")]


@pytest.mark.parametrize(
    ("kinds", "min_bytes", "at_place"),
    [
        ([(8, "bf16")], SENT_EACH, [True]),
        ([(9, "bf16")], SENT_EACH, [False]),
        (ALL_KINDS, SENT_EACH, [True, True, False, False, False, False, False]),
        (ALL_KINDS, COPIED, [False] * 7),
    ],
)
def test_shares_are_written_to_their_places(
    monkeypatch: pytest.MonkeyPatch, kinds: list[tuple[int, str]], min_bytes: int, at_place: list[bool]
) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", min_bytes)
    for stock, ours, found in on_threads(2, into_places, kinds):
        assert found == at_place
        for one, other in zip(stock, ours, strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize("sizes", [(6, 4), (8, 3)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int]) -> None:
    """torch looks at none of them, and NCCL would write past a tensor's end."""

    def gather_and_reduce() -> None:
        whole, own = (torch.zeros(size) for size in sizes)
        group = dist.group.WORLD
        with pytest.raises(AssertionError):
            collectives.all_gather_each([whole], [own], group)  # type: ignore[arg-type]
        with pytest.raises(AssertionError):
            collectives.reduce_scatter_each([own], [whole], dist.ReduceOp.SUM, group)

    on_threads(2, gather_and_reduce)


def of_one_storage(num: int) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """DeepSpeed's shares and ours of gradients that overlap, as autograd makes them; whether they are as before.

    Args:
        num: gradients in the bucket.
    """
    whole = torch.arange(24, dtype=torch.float32) + dist.get_rank()
    gradients = [whole, whole.view(-1), whole[8:16]][:num]
    before = whole.clone()
    stock = reduce_scatter_coalesced([one.clone() for one in gradients], dist.group.WORLD)
    return stock, reduce_scatter_shares(gradients, dist.group.WORLD), whole.equal(before)


@pytest.mark.parametrize(("world_size", "num"), [(1, 1), (2, 1), (2, 3), (4, 3)])
def test_gradients_of_one_storage_are_averaged_once(monkeypatch: pytest.MonkeyPatch, world_size: int, num: int) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", SENT_EACH)
    for stock, ours, is_as_before in on_threads(world_size, of_one_storage, num):
        assert is_as_before
        for one, other in zip(stock, ours, strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize(("level", "is_split"), [("OFF", True), ("INFO", True), ("DETAIL", False)])
def test_groups_that_check_every_call_get_one_buffer(
    monkeypatch: pytest.MonkeyPatch, level: str, is_split: bool
) -> None:
    """Those of torch 2.11 have no collectives of several tensors."""
    monkeypatch.setattr(dist, "get_debug_level", lambda: getattr(dist.DebugLevel, level))
    assert collectives.is_worth_it(2, 2 * collectives.MIN_BYTES) is is_split
    assert not collectives.is_worth_it(2, 2 * collectives.MIN_BYTES - 1)
