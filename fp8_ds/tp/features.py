"""Gather of an activation whose ranks have all tokens and a part of the channels each.

`gather_outputs` is for any reader: what arrives leaves FP8 by its sender's scales. The others are for FP8 linears: the
next GEMM contracts over channels, which have as many scales as there are ranks: codes are shifted to the largest by
powers of two, per tensor or per token. Blocks of 128 channels keep theirs. Then it is an operand like any other.

Shape suffixes: T tokens, C channels of all n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.formats import E4M3
from fp8_ds.nn.recipe import as_matrix
from fp8_ds.once_differentiable import once_differentiable
from fp8_ds.ops.blockwise import BLOCK
from fp8_ds.ops.quantize import quantize_rowwise
from fp8_ds.tp.context import TensorParallel
from fp8_ds.tp.gather import Gathered, Shard
from fp8_ds.tp.regions import reduced_tokens
from fp8_ds.tp.rules import BlockRule, RowRule, Rule
from fp8_ds.tp.scales import quantize_rows_pow2


def gathered_features(x: Tensor, rule: Rule, tp: TensorParallel, *, record: bool = False) -> Gathered:
    """E4M3 [T, C] of every rank's x [..., C / n]. Collective: one all-gather of a byte an element and scales.

    Args:
        x: this rank's channels.
        rule: of the layer that will read it.
        tp: the group.
        record: whether this is a training forward.

    Raises:
        ConfigError: recipe blockwise, and C / n is no multiple of 128.
    """
    x = as_matrix(x)
    num_tokens, num_channels = x.shape
    if isinstance(rule, BlockRule) and num_channels % BLOCK:
        raise ConfigError(
            f"x: expected a multiple of {BLOCK} channels on each rank with recipe blockwise, got {num_channels}. "
            "Blocks must not cross ranks: use another recipe."
        )
    # Rowwise sends powers of two here: unlike tokens, channels of several ranks meet in one row.
    shard = Shard(*quantize_rows_pow2(x, E4M3)) if isinstance(rule, RowRule) else rule.send_input(x, record=record)
    gathered = Gathered(tp.group, shard)
    codes = gathered.codes.view(tp.size, num_tokens, num_channels)
    scale_inv = gathered.scale_inv
    if isinstance(rule, BlockRule):
        whole_scale_inv = scale_inv.reshape(-1, num_tokens)  # [n, blocks, T] to [n blocks, T]
    else:
        whole_scale_inv = scale_inv.amax(0)
        ratio = (scale_inv / whole_scale_inv).to(torch.bfloat16).reshape(tp.size, -1, 1)
        codes = (codes.to(torch.bfloat16) * ratio).to(codes.dtype)
    whole = codes.view(torch.uint8).transpose(0, 1).reshape(num_tokens, tp.size * num_channels).view(codes.dtype)
    return Gathered.arrived_whole(whole, whole_scale_inv[None])


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, full: Tensor, tp: TensorParallel, reduces: bool) -> Tensor:
        ctx.tp, ctx.shape, ctx.reduces = tp, x.shape, reduces
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        size, num_channels = ctx.tp.size, ctx.shape[-1]
        by_rank = grad.reshape(-1, size, num_channels).transpose(0, 1)
        own = reduced_tokens(ctx.tp, by_rank) if ctx.reduces else by_rank[ctx.tp.rank]
        return own.reshape(ctx.shape), None, None, None


def gather_features_fp8(x: Tensor, rule: Rule, tp: TensorParallel, *, reduces: bool) -> Tensor:
    """A nominal tensor [..., C] that stands for all channels, for column-parallel FP8 layers (`gather_tokens_fp8`).

    Args:
        x: [..., C / n].
        rule: of the layers that will read it.
        tp: the group.
        reduces: whether what follows differs from rank to rank, so that gradients have to be added (reduce-scatter);
            else this rank takes its channels of them.
    """
    gathered = gathered_features(x.detach(), rule, tp, record=torch.is_grad_enabled())
    nominal = tp.inputs.nominal((*x.shape[:-1], gathered.shape[1]), x.dtype, x.device)
    result: Tensor = _GatherFeatures.apply(x, nominal, tp, reduces)
    tp.inputs.put(result, gathered)
    return result


def gather_features(x: Tensor, rule: Rule, tp: TensorParallel, *, reduces: bool) -> Tensor:
    """All channels [..., C] for any reader: they travel in FP8, and leave it on arrival.

    Args: as of `gather_features_fp8`.
    """
    gathered = gathered_features(x.detach(), rule, tp, record=torch.is_grad_enabled())
    rows = rule.rows(gathered)
    scale_inv = rows.scale_inv
    if isinstance(rule, BlockRule):
        scale_inv = scale_inv.repeat_interleave(BLOCK, 1)
    full = (gathered.codes.float() * scale_inv).to(x.dtype).view(*x.shape[:-1], gathered.shape[1])
    result: Tensor = _GatherFeatures.apply(x, full, tp, reduces)
    return result


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        rank, widest = dist.get_rank(group), max(sizes)
        ctx.first, ctx.size = sum(sizes[:rank]), sizes[rank]
        rows = as_matrix(x)
        if ctx.size < widest:
            rows = torch.nn.functional.pad(rows, (0, widest - ctx.size))
        gathered = Gathered(group, Shard(*quantize_rowwise(rows, E4M3)))
        num_tokens = rows.shape[0]
        scale_inv = gathered.scale_inv.view(len(sizes), num_tokens, 1)
        values = (gathered.codes.view(len(sizes), num_tokens, widest).float() * scale_inv).to(x.dtype)
        full = torch.cat([values[i, :, :size] for i, size in enumerate(sizes)], dim=1)
        return full.view(*x.shape[:-1], sum(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.first, ctx.size).contiguous(), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_outputs(x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """All channels [..., C] on all ranks, for readers that are the same everywhere; gradients are this rank's channels.

    Collective: one all-gather of E4M3 codes, as wide as the widest shard, and 4 bytes a token.

    Args:
        x: [..., sizes[rank]], this rank's channels.
        sizes: of every rank's shard, C together.
        group: the ranks.

    Raises:
        ValueError: x has another number of channels than `sizes` says.
    """
    rank = dist.get_rank(group)
    if x.shape[-1] != sizes[rank]:
        raise ValueError(
            f"x: expected {sizes[rank]} channels on rank {rank} of {len(sizes)}, got {x.shape[-1]}. Cut the weight as "
            f"sizes {sizes} say."
        )
    result: Tensor = _GatherOutputs.apply(x, sizes, group)
    return result
