"""DeepSpeed's Ulysses attention with q, k and v exchanged in FP8: retyped in place.

DeepSpeed sends q, k and v in bf16, one all-to-all each. Here they travel together, D + 1 bytes for a head of D
elements. The output of attention goes back in bf16. Seams: engine/seams.py.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from deepspeed.sequence import layer as ds_sequence
from torch import Tensor, nn

from fp8_ds.errors import ConfigError
from fp8_ds.numerics.formats import BY_NAME, Float8Format
from fp8_ds.tp.exchange import exchange_heads, exchange_tokens

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
        output: Tensor = exchange_tokens(context, self.spg, self.gather_idx)
        return output


class _HfMixin(nn.Module):
    """Mix-in before DeepSpeed's UlyssesSPAttentionHF."""

    fp8_grads: Float8Format | None
    process_group: Any
    kv_replication_factor: int

    def _combine_local_sequences(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange each [S, b, H, D] for [n S, b, H / n, D]; fewer k and v heads than ranks are repeated first."""
        if self.kv_replication_factor > 1:
            key, value = (x.repeat_interleave(self.kv_replication_factor, dim=2) for x in (key, value))
        result: tuple[Tensor, ...] = exchange_heads((query, key, value), self.process_group, 0, self.fp8_grads)
        return result


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
        _check_stock(module)
        module.__class__ = Fp8DistributedAttention
    elif type(module) is UlyssesSPAttentionHF:
        module.__class__ = type("Fp8UlyssesSPAttentionHF", (_HfMixin, UlyssesSPAttentionHF), {"__module__": __name__})
    else:
        raise ConfigError(
            "attention: expected DeepSpeed's DistributedAttention or UlyssesSPAttentionHF, got "
            f"{type(module).__name__}. Call this once, with the module itself."
        )
    module.fp8_grads = BY_NAME.get(grads)
    found: nn.Module = module
    return found


def _check_stock(module: Any) -> None:
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
