"""Ulysses' exchange of q, k and v in FP8, beside DeepSpeed's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from deepspeed.sequence.layer import DistributedAttention
from support.collectives import count_collectives
from support.ranks import on_ranks
from torch import Tensor, nn

from fp8_ds.numerics.formats import E5M2
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp.ulysses import exchange_heads, exchange_in_fp8

pytestmark = pytest.mark.distributed

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 16, 8, 4, 32
"""TOKENS of one rank."""


def inputs(gather_dim: int, heads: tuple[int, ...] = (HEADS, KV_HEADS, KV_HEADS)) -> list[Tensor]:
    """q, k and v of this rank, each head and token in a range of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (TOKENS, BATCH) if gather_dim == 0 else (BATCH, TOKENS)
    found = []
    for num in heads:
        x = torch.randn(*shape, num, SIZE, generator=generator)
        x *= 2.0 ** torch.randint(-8, 9, (*shape, num, 1), generator=generator)
        found.append(x.bfloat16().requires_grad_())
    return found


class Attention(nn.Module):
    """Over all tokens of some heads."""

    def __init__(self, gather_dim: int) -> None:
        super().__init__()
        self.order = (1, 2, 0, 3) if gather_dim == 0 else (0, 2, 1, 3)  # to [b, H, S, D]
        self.back = (2, 0, 1, 3) if gather_dim == 0 else (0, 2, 1, 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(self.order) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(self.back).contiguous()


def run(forward: Any, xs: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """(output and gradients, [(calls, bytes) of forward and of backward])."""
    xs = [x.detach().clone().requires_grad_() for x in xs]
    with count_collectives() as there:
        output = forward(*xs)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(7 + dist.get_rank())).to(output.dtype)
    with count_collectives() as back:
        output.backward(grad)
    return [output.detach(), *(x.grad for x in xs)], [(count.calls, count.num_bytes) for count in (there, back)]


@pytest.mark.parametrize(("gather_dim", "fmt"), [(0, None), (1, E5M2)], ids=str)
@on_ranks(4)
def test_every_head_arrives_with_all_tokens_and_gradients_find_their_way_back(gather_dim: int, fmt: Any) -> None:
    """Against the definition: all-gather, and take the own heads."""

    def of_all(x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(4)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    rank, xs = dist.get_rank(), inputs(gather_dim)
    arrived = exchange_heads(xs, dist.group.WORLD, gather_dim, fmt)
    for x, here in zip(xs, arrived, strict=True):
        expected = of_all(x.detach(), gather_dim).chunk(4, dim=2)[rank]
        assert here.shape == expected.shape
        assert sqnr_db(expected, here) > 30  # E4M3, a power of two for each head of a token
    grads = [torch.randn(one.shape, generator=torch.Generator().manual_seed(rank)).bfloat16() for one in arrived]
    for x, own, grad in zip(xs, torch.autograd.grad(arrived, xs, grads), grads, strict=True):
        expected = of_all(grad, 2).chunk(4, dim=gather_dim)[rank].contiguous()
        assert own.shape == x.shape
        if fmt is None:
            assert_bitwise(own, expected)
        else:
            assert sqnr_db(expected, own) > 24


def one_range(xs: list[Tensor]) -> list[Tensor]:
    return [x / x.detach().float().norm(dim=-1, keepdim=True).bfloat16() * 4 for x in xs]


@pytest.mark.parametrize(("gather_dim", "grads"), [(1, "bf16"), (0, "e5m2")])
@on_ranks(2)
def test_attention_differs_from_stock_by_one_rounding_and_sends_half_the_bytes(gather_dim: int, grads: Any) -> None:
    stock, fp8 = (
        DistributedAttention(Attention(gather_dim), dist.group.WORLD, scatter_idx=2, gather_idx=gather_dim)
        for _ in range(2)
    )
    assert exchange_in_fp8(fp8, grads) is fp8
    xs = one_range(inputs(gather_dim))
    (expected, talk), (own, talk_fp8) = (
        run(lambda *qkv, one=one: one(*qkv, 1 - gather_dim), xs) for one in (stock, fp8)
    )
    sqnr = [sqnr_db(a, b) for a, b in zip(expected, own, strict=True)]
    assert sqnr[0] > 26 and min(sqnr) > {"bf16": 22, "e5m2": 20}[grads], sqnr
    rows, output = TOKENS * BATCH * (HEADS + 2 * KV_HEADS), 2 * TOKENS * BATCH * HEADS * SIZE
    back = rows * 2 * SIZE if grads == "bf16" else rows * (SIZE + 1)
    assert talk == [({"all_to_all": 4}, {"all_to_all": 2 * rows * SIZE + output})] * 2
    there = {"all_to_all": rows * (SIZE + 1) + output}
    assert talk_fp8 == [({"all_to_all": 2}, there), ({"all_to_all": 2}, {"all_to_all": back + output})]


@pytest.mark.parametrize("kv_heads", [4, 2])
@on_ranks(4)
def test_transformers_attention_differs_from_stock_by_one_rounding(kv_heads: int) -> None:
    """UlyssesSPAttentionHF as transformers calls it; registered, found and retyped. With fewer k and v heads than ranks
    these are repeated before they travel, as stock does."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).contiguous(), None

    stock, fp8 = (
        ulysses_sp.UlyssesSPAttentionHF(
            attn=attend,
            batch_size=BATCH,
            attn_head_count=HEADS,
            attn_head_size=SIZE,
            kv_head_count=kv_heads,
            num_hidden_layers=1,
            process_group=dist.group.WORLD,
            local_seq_length=TOKENS,
            global_seq_length=TOKENS * 4,
        )
        for _ in range(2)
    )
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: fp8(*args, **kwargs)
    try:
        assert exchange_in_fp8() is fp8
    finally:
        ALL_ATTENTION_FUNCTIONS.pop("sdpa", None)
    xs = one_range([x.transpose(1, 2) for x in inputs(1, (HEADS, kv_heads, kv_heads))])
    positions = torch.arange(TOKENS).repeat(BATCH, 1) + TOKENS * dist.get_rank()
    module = SimpleNamespace(training=True, num_key_value_groups=1, layer_idx=0)
    results = []
    for one in (stock, fp8):
        with count_collectives() as count:  # newer versions' own exchange is an op that hides its collective from it
            results.append(run(lambda *qkv, one=one: one(module, *qkv, None, position_ids=positions)[0], xs)[0])
    sqnr = [sqnr_db(a, b) for a, b in zip(*results, strict=True)]
    assert sqnr[0] > 26 and min(sqnr) > 22, sqnr
    rows = TOKENS * BATCH * (HEADS + 2 * max(kv_heads, 4))
    moved = [record for record in count.records if record[2] == torch.uint8]
    assert moved == [("all_to_all", rows * (SIZE + 1), torch.uint8), ("all_to_all", rows * 2 * SIZE, torch.uint8)]


@pytest.mark.timeout(300)
@on_ranks(2)
def test_what_cannot_be_exchanged_is_an_error_on_every_rank() -> None:
    group = dist.group.WORLD
    done = exchange_in_fp8(DistributedAttention(Attention(0), group))
    uneven = [x[:, :, :3] for x in inputs(0)]
    overlapping = DistributedAttention(Attention(0), group)
    overlapping.sp_overlap_comm = True
    nan = inputs(0)
    with torch.no_grad():
        nan[0][0, 0, 0, 0] = math.nan
    arrived = exchange_heads(nan, group, 0)[0]
    assert not torch.isfinite(arrived[::TOKENS, 0, 0, 0]).all() or dist.get_rank() > 0
    calls: dict[str, Callable[[], Any]] = {
        "got Fp8DistributedAttention": lambda: exchange_in_fp8(done),
        "got Linear": lambda: exchange_in_fp8(nn.Linear(2, 2)),
        "among transformers'": lambda: exchange_in_fp8(),
        "sp_stream": lambda: exchange_in_fp8(overlapping),
        "scatter_idx 2": lambda: exchange_in_fp8(DistributedAttention(Attention(0), group, scatter_idx=1)),
        "got 'fp16'": lambda: exchange_in_fp8(DistributedAttention(Attention(0), group), "fp16"),  # type: ignore[arg-type]
        "H divisible by 2 ranks": lambda: done(*uneven, 1),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


# --- in DeepSpeed's engine ---


def share_sequences(stage: int, fp8: dict[str, Any] | None, folder: str | None = None) -> tuple[list[float], Any]:
    """(gradient norms of three steps in which each rank has its own tokens of a sequence, masters); saved if asked."""
    from deepspeed.utils import groups

    engine = training.build(training.ds_config(stage, fp8), mpu=tpar.sequence_parallel_mpu())
    norms = []
    for step in range(3):
        tokens = training.micro_batches(step, 1)[0]
        own = tokens.shape[1] // dist.get_world_size()
        loss = engine(tokens[:, dist.get_rank() * own :][:, : own + 1])
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    masters = training.full_masters(engine)
    if folder is not None:
        engine.save_checkpoint(folder)
    training.destroy(engine)
    groups.mpu = None
    return norms, masters


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_reduced_in_fp8_are_divided_by_as_many_ranks_as_stocks(ranks: Any, stage: int) -> None:
    """In stage 2 by the ranks that do not share a sequence, in stage 3 by all: stock has it so."""
    block = {"zero": {"reduce_scatter": "fp8"}}
    ours, stock = (ranks(2).run(share_sequences, stage, one)[0][0] for one in (block, None))
    assert ours == pytest.approx(stock, rel=0.06)


def load_universal(folder: str) -> Any:
    engine = training.build(training.ds_config(1, {}, checkpoint={"load_universal": True}), seed=5)
    engine.load_checkpoint(folder)
    masters = training.full_masters(engine)
    training.destroy(engine)
    return masters


def test_a_run_that_shares_sequences_goes_to_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """Stock takes ranks that share a sequence for tensor-parallel ones, and misses the model files of the others."""
    from fp8_ds.tools.convert import convert

    masters = ranks(2).run(share_sequences, 1, {}, str(tmp_path))[0][1]
    convert(tmp_path, tmp_path / "universal", "universal", stage=1)
    found = ranks(1).run(load_universal, str(tmp_path))[0]
    assert found.keys() == masters.keys()
    for name, master in found.items():
        assert_bitwise(master, masters[name])
