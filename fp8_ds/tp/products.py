"""The gather of an operand in FP8, and the GEMMs of it.

Shape suffixes: S tokens of one rank, T = S n tokens of all n ranks, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.nn.recipe import Fp8Weight
from fp8_ds.tp.context import TensorParallel
from fp8_ds.tp.gather import Gathered, Shard
from fp8_ds.tp.graph import all_gathered, is_tracing
from fp8_ds.tp.rules import Kept, Rule


def gather_shard(shard: Shard, tp: TensorParallel) -> Gathered:
    """Every rank's `shard`, under way where it may be. Collective."""
    if is_tracing():
        codes, scale_inv = all_gathered([shard.codes, shard.scale_inv[None]], tp)
        return Gathered.arrived_whole(codes, scale_inv)
    gathered = Gathered(tp.group, shard)
    tp.num_bytes_gathered += gathered.num_bytes
    return gathered


def column_output(
    rule: Rule, gathered: Gathered, weight_fp8: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x W^T + b` of a gathered x, [T, O].

    Args:
        rule: of the layer.
        gathered: x.
        weight_fp8: [O, I], this rank's, from `read_weight`.
        bias: [O].
        dtype: of the output.
    """
    return rule.recipe.biased_output(rule.rows(gathered), weight_fp8, bias, dtype)


def row_grads(
    rule: Rule,
    gathered: Gathered,
    weight_fp8: Fp8Weight | None,
    kept: Kept | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input [T, I], grad_weight [O, I]) of a gathered grad_output; None for what is not wanted.

    Args:
        rule: of the layer.
        gathered: grad_output.
        weight_fp8: from `Rule.prepared`; None: grad_input is not wanted.
        kept: of x; None: grad_weight is not wanted.
        dtypes: of the two.
    """
    grad_input = None
    if weight_fp8 is not None:
        grad_input = rule.grad_input(rule.rows(gathered), weight_fp8, dtypes[0])
    grad_weight = None if kept is None else rule.grad_weight(gathered, kept, dtypes[1])
    return grad_input, grad_weight
