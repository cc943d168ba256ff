"""estimate_states against what training holds: every part, and the total, between steps and when a step begins; and the
peaks of initialize and of a step."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import test_release
import torch
import torch.distributed as dist
import training
from rank_memory import RankMemory
from support.adam_shards import state_bytes
from torch import Tensor

from fp8_ds.config import LinearConfig, OptimizerConfig
from fp8_ds.tools.estimate import Setup, StateBytes, estimate_states, parts_by_rank, weights_of

pytestmark = pytest.mark.distributed

ROUND = {"width": 128, "hidden": 512, "num_blocks": 2}
MANY = {"width": 64, "hidden": 128, "num_blocks": 32, "bias": False}
"""No weight is more than a 66th of all."""
RAGGED = {"width": 136, "hidden": 408, "num_blocks": 2, "frozen": "blocks.1.up"}
"""Fragments and shards begin and end within groups of 128; one layer is frozen."""
BUCKET = 50_000
IN_FP32 = {"grad_accum_dtype": "fp32"}


def bytes_of(tensors: list[Tensor]) -> int:
    """Of distinct storages."""
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured_parts(engine: Any) -> dict[str, int]:
    """What the engine's own tensors take."""
    optimizer, resident = engine.optimizer, engine.optimizer.fp8.resident_bytes()
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parts = {"weights": resident["fp8"] + resident["hp"], "gathered": resident.get("persistent", 0)}
    if stage3 and dist.get_world_size() == 1:
        parts["gathered"] = 0  # the shard is the whole weight
    if not stage3:
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        parts["weights"] += bytes_of([p for p in frozen if not hasattr(p, "_fp8")])
    masters = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
    parts["master"] = bytes_of([master.detach() for master in masters])
    if hasattr(optimizer.optimizer, "core"):
        states = state_bytes(optimizer.optimizer.core.shards)
        parts["master"] += states["master"]
        parts["moments"], parts["moment_scales"] = states["moments"], states["moment_scales"]
    else:
        moments = [v for state in optimizer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        parts["moments"], parts["moment_scales"] = bytes_of([v for v in moments if v.numel() > 1]), 0
    return parts


def measure(stage: int, block: dict[str, Any], model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Parts and totals of a real training after a step, and their estimate for this rank."""
    gc.collect()
    optimizer, linear = OptimizerConfig(**block["optimizer"]), LinearConfig(**block.get("linear", {}))
    if "schedule" in block:  # states are fp32 after the first step
        optimizer = OptimizerConfig()
    zero = {"stage3_param_persistence_threshold": 500, **options.pop("zero_optimization", {})}
    with RankMemory() as memory:
        engine = test_release.build(stage, block, model, num_elements=BUCKET, zero_optimization=zero, **options)
        at_initialize = memory.peak
        training.train(engine, 1)
        gc.collect()
        between, parts = memory.live, measured_parts(engine)
        loss = engine(training.micro_batches(1, 1)[0][:1])
        engine.backward(loss)
        del loss
        gc.collect()
        memory.peak = at_step = memory.live
        engine.step()
        in_step = memory.peak - at_step
    training.destroy(engine)
    dtype_bytes = 4 if "data_types" in options else 2
    setup = Setup(
        stage,
        dist.get_world_size(),
        optimizer,
        grad_bytes=dtype_bytes,
        overlap_comm=zero.get("overlap_comm"),
        reduce_bucket_size=BUCKET,
        persistence_threshold=500,
    )
    weights = weights_of(training.TinyLM(**model), linear)
    most, mine = estimate_states(weights, setup), list(parts_by_rank(weights, setup))[dist.get_rank()]
    return {
        "between": between,
        "at step": at_step,
        "parts": parts,
        "estimate": replace(most, fp8=mine[True], other=mine[False]),
        "most": most,
        "initialize": at_initialize,
        "step": in_step,
        "num_params": sum(weight.numel for weight in weights),
    }


Case = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    (3, {"optimizer": {}}, RAGGED, {}),
    (2, {"optimizer": {"states": "fp8"}, "linear": {"frozen": "fp8"}}, RAGGED, {"data_types": IN_FP32}),
    (1, test_release.block("e4m11", True), RAGGED, {"zero_optimization": {"overlap_comm": True}}),
    (2, test_release.block("e4m11", False), MANY, {}),
    (3, test_release.block("e4m19", False), RAGGED, {}),
    (3, test_release.block("e4m11", True), ROUND, {}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimate_agrees_with_what_training_holds_and_no_fp32_copy_exists(ranks: Any, case: Case) -> None:
    of_ranks = ranks(2).run(measure, *case[:3], **case[3])
    for found in of_ranks:
        estimate: StateBytes = found["estimate"]
        assert found["between"] == pytest.approx(estimate.between_steps, rel=0.02)
        assert found["at step"] == pytest.approx(estimate.at_step, rel=0.02)
        for name, measured in found["parts"].items():
            assert measured == pytest.approx(getattr(estimate.parts, name), rel=1e-3, abs=64), name
        if case[2] is MANY:  # bytes a parameter: the model as the user builds it; temporaries of one shard
            assert found["initialize"] <= 4.1 * found["num_params"]
            assert found["step"] <= 0.7 * 4 / 2 * found["num_params"]
    assert max(found["at step"] for found in of_ranks) == pytest.approx(of_ranks[0]["most"].at_step, rel=0.02)
