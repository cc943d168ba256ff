"""FP8 weights under Megatron's distributed optimizer, as Transformer Engine has to read them; for
tests/gpu/test_megatron_gpu.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from fp8_ds.numerics.masters import BY_NAME, encode


def assert_same_on_all_ranks(value: Tensor, group: Any, what: str) -> None:
    """Collective."""
    low, high = value.detach().clone(), value.detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    assert torch.equal(low, high), f"{what}: data parallel ranks differ in {int((low != high).sum())} numbers"


def num_checked(optimizer: Any, has_transposes: bool = True) -> int:
    """FP8 weights, each found to be as Transformer Engine 2.11 has to read it: other ranks' shards of it, too.

    Collective, over the ranks that share the weights: bytes, scales and amaxes are theirs as well.

    Args:
        optimizer: after a step, its weights gathered.
        has_transposes: without --fp8-drop-transposes.
    """
    weights, names = optimizer._fp8_weights.weights, optimizer._fp8_weights.names
    scales, group = optimizer._fp8_weights.scales, optimizer.data_parallel_group
    scales.wait()
    assert_same_on_all_ranks(scales.amax, group, "amaxes")
    for name, p in zip(names, weights, strict=True):
        assert_same_on_all_ranks(p._scale_inv, group, f"{name}, scale")
        assert_same_on_all_ranks(p._data, group, f"{name}, bytes")
    for name, p in zip(names, weights, strict=True):
        assert float(torch.frexp(p._scale_inv)[0]) == 0.5, f"{name}: a power of two"
        value = p._data.view(torch.float8_e4m3fn).float() * p._scale_inv
        assert torch.equal(p.dequantize().float(), value), name
        # What backwards read on Hopper; post_all_gather_processing makes it.
        if has_transposes:
            assert not p._transpose_invalid and torch.equal(p._transpose, p._data.t()), name
        else:
            assert p._transpose is None, name
    for p, _ in optimizer._fp8_pairs():
        if is_float8tensor(p):
            own = optimizer._get_model_param_range_map(p)["param"]
            master = optimizer._get_main_param_and_optimizer_states(p)["param"].reshape(-1).cpu()
            high = encode(master, BY_NAME[optimizer.optimizer.master], p._scale_inv.cpu())[0]
            assert torch.equal(high, p._data.view(-1)[own.start : own.end].cpu()), "the master's high part"
    return len(weights)
