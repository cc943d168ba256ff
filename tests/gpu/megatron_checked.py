"""The wrapper's pretrain_gpt.py; after each step Transformer Engine's FP8 weights are what our masters say.

Run by test_megatron_gpu.py under torchrun; $MEGATRON_LM_PATH names the clone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, os.environ.get("MEGATRON_LM_PATH", ""))

from megatron.core.fp8_utils import is_float8tensor

from fp8_ds.optim.masters import BY_NAME, encode
from megatron_patches import pretrain_gpt
from megatron_patches.optimizer_sharded import Fp8DistributedOptimizer


def assert_same_on_all_ranks(value: Tensor, group: Any, what: str) -> None:
    """Collective."""
    low, high = value.detach().clone(), value.detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    assert torch.equal(low, high), f"{what}: data parallel ranks differ in {int((low != high).sum())} numbers"


def num_checked(optimizer: Any) -> int:
    """FP8 weights, each found to be as Transformer Engine 2.11 has to read it: other ranks' shards of it, too.

    Collective, over the ranks that share the weights: bytes, scales and amaxes are theirs as well.

    Args:
        optimizer: after a step, its weights gathered.
    """
    weights, names = optimizer._fp8_weights.weights, optimizer._fp8_weights.names
    scales, group = optimizer._fp8_weights.scales, optimizer.data_parallel_group
    scales.wait()
    assert_same_on_all_ranks(scales.amax, group, "amaxes")
    for name, p in zip(names, weights, strict=True):
        assert_same_on_all_ranks(p._scale_inv, group, f"{name}, scale")
        assert_same_on_all_ranks(p._data, group, f"{name}, bytes")
    for p in weights:
        assert float(torch.frexp(p._scale_inv)[0]) == 0.5, "a power of two"
        value = p._data.view(torch.float8_e4m3fn).float() * p._scale_inv
        assert torch.equal(p.dequantize().float(), value)
        # What backwards read on Hopper; post_all_gather_processing makes it.
        assert not p._transpose_invalid and torch.equal(p._transpose, p._data.t())
    for p, _ in optimizer._fp8_pairs():
        if is_float8tensor(p):
            own = optimizer._get_model_param_range_map(p)["param"]
            master = optimizer._get_main_param_and_optimizer_states(p)["param"].reshape(-1).cpu()
            high = encode(master, BY_NAME[optimizer.optimizer.master], p._scale_inv.cpu())[0]
            assert torch.equal(high, p._data.view(-1)[own.start : own.end].cpu()), "the master's high part"
    return len(weights)


def checked_step(optimizer: Any) -> bool:
    """In the place of DistributedOptimizer's."""
    done = stock_step(optimizer)
    num = num_checked(optimizer)
    print(f"checked {num} FP8 weights", flush=True)
    return done


stock_step = Fp8DistributedOptimizer.step_with_ready_grads

if __name__ == "__main__":
    Fp8DistributedOptimizer.step_with_ready_grads = checked_step  # type: ignore[method-assign]
    pretrain_gpt.main()
