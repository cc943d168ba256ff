"""estimate_states against what training holds: every part, and the total, between steps and when a step begins."""

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
RAGGED = {"width": 136, "hidden": 408, "num_blocks": 2, "frozen": "blocks.1.up"}
"""Fragments and shards begin and end within groups of 128; one layer is frozen."""
BUCKET = 50_000
MASTERS = ("e4m19", "e4m11")


def bytes_of(tensors: list[Tensor]) -> int:
    """Of distinct storages."""
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured_parts(engine: Any) -> dict[str, int]:
    """What the engine's own tensors take."""
    optimizer, resident = engine.optimizer, engine.optimizer.fp8_resident_bytes()
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parts = {"weights": resident["fp8"] + resident["hp"], "gathered": resident.get("persistent", 0)}
    if stage3 and dist.get_world_size() == 1:
        parts["gathered"] = 0  # the shard is the whole weight
    if not stage3:
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        payloads = [p._fp8 for p in engine.fp8.frozen.values()]
        parts["weights"] += bytes_of([p for p in frozen if not hasattr(p, "_fp8")] + [p.data for p in payloads])
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
        training.train(engine, 1)
        gc.collect()
        between, parts = memory.live, measured_parts(engine)
        loss = engine(training.micro_batches(1, 1)[0][:1])
        engine.backward(loss)
        del loss
        gc.collect()
        at_step = memory.live
        engine.step()
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
        "per_fp8_weight": mine[True].total / sum(weight.numel for weight in weights if weight.is_fp8),
    }


def all_masters(stage: int) -> dict[tuple[str, bool], dict[str, Any]]:
    """Every master with and without release; both models in turn."""
    found = {}
    for number, master in enumerate(MASTERS):
        for release in (False, True):
            model = RAGGED if (number + release + stage) % 2 else ROUND
            found[master, release] = measure(stage, test_release.block(master, release), model)
    return found


def check(found: dict[str, Any], case: Any) -> StateBytes:
    estimate: StateBytes = found["estimate"]
    assert found["between"] == pytest.approx(estimate.between_steps, rel=0.02), case
    assert found["at step"] == pytest.approx(estimate.at_step, rel=0.02), case
    for name, measured in found["parts"].items():
        assert measured == pytest.approx(getattr(estimate.parts, name), rel=1e-3, abs=64), (case, name)
    return estimate


RUNS = [(3, 2)]


@pytest.mark.parametrize(("stage", "world_size"), RUNS)
def test_estimate_agrees_with_what_training_holds(ranks: Any, stage: int, world_size: int) -> None:
    ranks_found = ranks(world_size).run(all_masters, stage)
    for found in ranks_found:
        for case, result in found.items():
            estimate = check(result, case)
            assert (estimate.parts.gradients > 0) == (not case[1])
            assert (estimate.parts.gathered > 0) == (stage == 3 and world_size > 1)
    for case in ranks_found[0]:
        largest = max(found[case]["at step"] for found in ranks_found)
        assert largest == pytest.approx(ranks_found[0][case]["most"].at_step, rel=0.02)
    if world_size == 1:  # the claims of the README, on a real model of 0.3 M parameters
        assert ranks_found[0]["e4m11", False]["per_fp8_weight"] == pytest.approx(6.06, abs=0.01)
        assert ranks_found[0]["e4m19", False]["per_fp8_weight"] == pytest.approx(7.06, abs=0.01)


Case = tuple[int, dict[str, Any], dict[str, Any]]
COVERING: list[Case] = [
    (3, {"optimizer": {}}, {}),
    (2, {"optimizer": {"states": "fp8"}, "linear": {"frozen": "fp8"}}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, test_release.block("e4m11", True), {"zero_optimization": {"overlap_comm": True}}),
    (2, {"optimizer": {"states": "fp8", "master": "e4m11"}}, {}),
    (3, {"optimizer": {"states": "fp8", "master": "e4m19"}}, {}),
]


def all_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return [measure(stage, block, RAGGED, **dict(options)) for stage, block, options in cases]


def test_estimate_knows_fp32_states_fp32_gradients_and_overlap(ranks: Any) -> None:
    for rank in ranks(2).run(all_cases, COVERING):
        for case, found in zip(COVERING, rank, strict=True):
            check(found, case)
