"""A shard as numbers: in chunks as in one, a part as the whole."""

from __future__ import annotations

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_shard

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.masters import BF16_8, E4M11, E4M19, FP32, MasterFormat
from fp8_ds.ops.adamw import dense


@pytest.mark.parametrize("fmt", [FP32, E4M19, E4M11, BF16_8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("start", [0, 199])
def test_a_shard_is_read_and_written_in_chunks_as_in_one(
    fmt: MasterFormat, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [make_shard(fmt, 1000, start, seed) for seed in (0, 1)]
    scale_inv = torch.tensor([2.0**-14])
    found = []
    for chunk in (1 << 24, 256):
        monkeypatch.setattr(dense, "CHUNK", chunk)
        source, target = map(clone_shard, shards)
        kept = torch.arange(1000) % 3 == 0
        values = {key: torch.empty(1000, dtype=torch.float32) for key in (None, *dense.MOMENTS)}
        for key, value in values.items():
            dense.read_dense(source, key, value, scale_inv)
            dense.write_dense(target, key, value, scale_inv)
        assert differences(target, source) == []
        if fmt.is_split:
            dense.write_low(target, values[None].flip(0), kept, scale_inv)
        found.append((target, values))
    (whole, expected), (pieces, got) = found
    assert differences(pieces, whole) == []
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("fmt", [FP32, E4M11], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("start", "stop"), [(199, 199), (199, 230), (256, 512), (300, 777), (1100, 1199)])
def test_a_part_of_a_shard_has_its_own_elements_and_no_copies(fmt: MasterFormat, start: int, stop: int) -> None:
    shard, scale_inv = make_shard(fmt, 1000, 199), torch.tensor([2.0**-14])
    part = shard.part(ShardRange(start, stop))
    assert (part.start, part.numel, part.num_groups) == (start, stop - start, len(part.m_scale_inv))
    for key in (None, *dense.MOMENTS):
        whole, own = (torch.empty(x.numel, dtype=torch.float32) for x in (shard, part))
        dense.read_dense(shard, key, whole, scale_inv)
        dense.read_dense(part, key, own, scale_inv)
        assert torch.equal(own, whole[start - 199 : stop - 199])
    for name in ("hi", "lo", "m", "v", "m_scale_inv", "v_scale_inv"):
        of_whole, of_part = getattr(shard, name), getattr(part, name)
        assert of_whole is None or of_part.untyped_storage().data_ptr() == of_whole.untyped_storage().data_ptr()
