"""DeepSpeed's Ulysses attention with q, k and v exchanged in FP8: retyped in place.

DeepSpeed sends q, k and v in bf16, one all-to-all each. Here they travel together, from shards of the sequence to
shards of the heads. Each head of each token is a row with a power of two of its own, which travels as its exponent:
D + 1 bytes. On arrival the row leaves FP8 by it; nothing is aligned, and no rank waits for another's largest element.
The output of attention goes back in bf16. Seams: engine/seams.py.

Shape suffixes: n ranks, S tokens of one rank, H heads, D elements of a head, R rows of D elements each.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.sequence import layer as ds_sequence
from torch import Tensor, nn

from fp8_ds.errors import ConfigError
from fp8_ds.numerics.formats import BY_NAME, E4M3, Float8Format
from fp8_ds.ops._register import once_differentiable
from fp8_ds.tp.rules import quantize_rows_pow2

GradFormat = Literal["bf16", "e4m3", "e5m2"]


class Fp8DistributedAttention(ds_sequence.DistributedAttention):
    """deepspeed.sequence.layer.DistributedAttention in FP8; `exchange_in_fp8` makes it.

    Attributes:
        fp8_grads: format of the gradients of q, k and v on their way; None: bf16.
    """

    fp8_grads: Float8Format | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Run DistributedAttention.forward; q, k and v have four dims, and heads that divide."""
        query, key, value = exchange_heads((query, key, value), self.spg, self.gather_idx, self.fp8_grads)
        if rotary_pos_emb is not None:
            cos, sin = rotary_pos_emb[0].permute(1, 0, 2, 3), rotary_pos_emb[1].permute(1, 0, 2, 3)
            query = ds_sequence.apply_rotary_pos_emb(query, cos, sin)
            key = ds_sequence.apply_rotary_pos_emb(key, cos, sin)
        context = self.local_attn(query, key, value, *args, **kwargs)
        return exchange_tokens(context, self.spg, self.gather_idx)


class _HfMixin(nn.Module):
    """Mix-in before DeepSpeed's UlyssesSPAttentionHF."""

    fp8_grads: Float8Format | None
    process_group: Any
    kv_replication_factor: int

    def _combine_local_sequences(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange each [S, b, H, D] for [n S, b, H / n, D]; fewer k and v heads than ranks are repeated first."""
        if self.kv_replication_factor > 1:
            key, value = (x.repeat_interleave(self.kv_replication_factor, dim=2) for x in (key, value))
        return exchange_heads((query, key, value), self.process_group, 0, self.fp8_grads)


def exchange_in_fp8(attention: nn.Module | None = None, grads: GradFormat = "bf16") -> nn.Module:
    """Make a Ulysses attention send q, k and v in E4M3 from now on, in place.

    Args:
        attention: a DistributedAttention or an UlyssesSPAttentionHF; None: the one that
            UlyssesSPAttentionHF.register_with_transformers has put into transformers.
        grads: format in which their gradients travel.

    Returns:
        `attention`.

    Raises:
        ConfigError: it is neither of these, does it already, overlaps its all-to-alls on a stream of its own, or
            exchanges other dims than heads and tokens.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if grads not in ("bf16", "e4m3", "e5m2"):
        raise ConfigError(f'grads: expected "bf16", "e4m3" or "e5m2", got {grads!r}.')
    module: Any = _registered(UlyssesSPAttentionHF) if attention is None else attention
    if type(module) is ds_sequence.DistributedAttention:
        _check_exchange(module)
        module.__class__ = Fp8DistributedAttention
    elif type(module) is UlyssesSPAttentionHF:
        module.__class__ = type("Fp8UlyssesSPAttentionHF", (_HfMixin, UlyssesSPAttentionHF), {"__module__": __name__})
    else:
        raise ConfigError(
            "attention: expected DeepSpeed's DistributedAttention or UlyssesSPAttentionHF, got "
            f"{type(module).__name__}. Call this once, with the module itself."
        )
    module.fp8_grads = BY_NAME.get(grads)
    return module


def _check_exchange(module: Any) -> None:
    if module.sp_overlap_comm:
        raise ConfigError(
            "attention: expected one without sp_stream, got one that overlaps q's, k's and v's all-to-alls. They are "
            "one here: construct it without."
        )
    if module.scatter_idx != 2 or module.gather_idx not in (0, 1):
        raise ConfigError(
            f"attention: expected scatter_idx 2 and gather_idx 0 or 1, got {module.scatter_idx} and "
            f"{module.gather_idx}. Bring q, k and v as [S, b, H, D] or [b, S, H, D]."
        )


def _registered(kind: type) -> Any:
    """Return the one that a function among transformers' attention functions has in its closure."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = [ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()]
    closures = [inspect.getclosurevars(function).nonlocals for function in functions if inspect.isfunction(function)]
    found = {id(x): x for names in closures for x in names.values() if isinstance(x, kind)}
    if len(found) != 1:
        raise ConfigError(
            f"attention: expected one {kind.__name__} among transformers' attention functions, got {len(found)}. Call "
            f"{kind.__name__}.register_with_transformers first, or pass the module."
        )
    return next(iter(found.values()))


_HEADS = 2
"""The dim of the heads."""
_MANTISSA_BITS = 23


def exchange(shards: Sequence[Tensor], group: dist.ProcessGroup, fmt: Float8Format | None) -> list[Tensor]:
    """Send part [r] of each tensor [n, ..., D] to rank r; return the parts that the ranks sent, in their order.

    Collective: one all-to-all for all tensors, which are contiguous and of the same shapes on all ranks.

    Args:
        fmt: format on the wire; None: the tensors' own dtype. A row with a NaN or an infinity arrives without a finite
            number other than zero.
    """
    num_ranks = dist.get_world_size(group)
    packed = [_pack(shard, fmt) for shard in shards]
    sizes = [part.numel() // num_ranks for parts in packed for part in parts]
    sent = torch.cat([part.view(num_ranks, -1) for parts in packed for part in parts], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = iter(received.split(sizes, dim=1))
    return [_unpack([next(parts) for _ in own], shard, fmt) for own, shard in zip(packed, shards, strict=True)]


def _pack(shard: Tensor, fmt: Float8Format | None) -> list[Tensor]:
    """Return the bytes of [n, ..., D], uint8; or its codes, and the exponents of its rows."""
    if fmt is None:
        return [shard.view(torch.uint8)]
    codes, scale_inv = quantize_rows_pow2(shard.view(-1, shard.shape[-1]), fmt)
    exponents = (scale_inv.view(torch.int32) >> _MANTISSA_BITS) & 0xFF
    return [codes.view(torch.uint8), exponents.to(torch.uint8)]


def _unpack(parts: list[Tensor], like: Tensor, fmt: Float8Format | None) -> Tensor:
    if fmt is None:
        return parts[0].contiguous().view(like.dtype).view(like.shape)
    codes = parts[0].contiguous().view(fmt.torch_dtype).view(-1, like.shape[-1])
    scale_inv = (parts[1].reshape(-1, 1).to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return (codes.float() * scale_inv).to(like.dtype).view(like.shape)


def _split(x: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Split `dim` into n pieces, [n, ...]."""
    return x.unflatten(dim, (num_ranks, -1)).movedim(dim, 0).contiguous()


def _join(x: Tensor, dim: int) -> Tensor:
    """Join the pieces of [n, ...] one after another in `dim`."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Any, dims: tuple[int, int], formats: Sequence[Float8Format | None], *xs: Tensor
    ) -> Any:
        ctx.group, (ctx.split_dim, ctx.join_dim), (fmt, ctx.grad_format) = group, dims, formats
        shards = [_split(x, ctx.split_dim, dist.get_world_size(group)) for x in xs]
        return tuple(_join(one, ctx.join_dim) for one in exchange(shards, group, fmt))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shards = [_split(grad, ctx.join_dim, dist.get_world_size(ctx.group)) for grad in grads]
        found = exchange(shards, ctx.group, ctx.grad_format)
        return None, None, None, *(_join(one, ctx.split_dim) for one in found)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_heads(
    xs: Sequence[Tensor], group: dist.ProcessGroup, gather_dim: int, grad_format: Float8Format | None = None
) -> tuple[Tensor, ...]:
    """Exchange a rank's tokens of all heads for all tokens of its heads. Collective: one all-to-all each way.

    Args:
        xs: q, k and v: [S, b, H, D] or [b, S, H, D], H of each divisible by n.
        gather_dim: dim of S.
        grad_format: format of the gradients on their way back; None: their own dtype.

    Returns:
        [n S, b, H / n, D] or [b, n S, H / n, D] of each, in its dtype.

    Raises:
        ValueError: something in `xs` has other dims, or heads that do not divide; on all ranks, as shapes are the same.
    """
    num_ranks = dist.get_world_size(group)
    for x in xs:
        if x.dim() != 4 or x.shape[_HEADS] % num_ranks:
            raise ValueError(
                f"xs: expected [S, b, H, D] or [b, S, H, D], H divisible by {num_ranks} ranks, got {tuple(x.shape)}. "
                "Use fewer ranks, or DeepSpeed's own exchange."
            )
    return _Exchange.apply(group, (_HEADS, gather_dim), (E4M3, grad_format), *xs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_tokens(x: Tensor, group: dist.ProcessGroup, scatter_dim: int) -> Tensor:
    """Exchange all tokens of a rank's heads for its tokens of all heads, in x's dtype. Collective: one each way.

    Args:
        x: attention's output, of shape and heads as `exchange_heads` gives them.
        scatter_dim: dim of the tokens, 0 or 1.
    """
    (result,) = _Exchange.apply(group, (scatter_dim, _HEADS), (None, None), x)
    return result
