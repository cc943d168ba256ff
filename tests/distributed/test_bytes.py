"""What goes over the wire: counted by a dispatch mode that sees every collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from support.collectives import count_collectives

from fp8_ds.comm import collectives

pytestmark = pytest.mark.distributed

MODEL = {"width": 64, "hidden": 256, "num_blocks": 3}
NUM_LAYERS = 6


def traffic(stage: int, fp8: dict[str, Any] | None, **zero: Any) -> dict[str, Any]:
    """Collectives of the third step (ZeRO-3 prefetches by the trace of the first), and our own counters of it."""
    config = training.ds_config(stage, fp8, zero_optimization=zero)
    engine = training.build(config, MODEL)
    training.train(engine, 2)
    with count_collectives() as count:
        training.train(engine, 1, first_step=2)
    result = {
        "records": count.records,
        "gather_bytes": count.gather_bytes,
        "num_all": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "report": engine.fp8_report() if fp8 is not None else {},
        "persistent": len(getattr(engine.optimizer, "persistent_parameters", ())),
    }
    if fp8 is not None:
        result["weights"] = {n: getattr(p, "ds_numel", p.numel()) for n, p in engine.fp8.weights.items()}
    training.destroy(engine)
    return result


@pytest.fixture(scope="module")
def seen(ranks: Any) -> Callable[..., list[dict[str, Any]]]:
    """`traffic` on so many ranks, once for all tests."""
    found: dict[str, list[dict[str, Any]]] = {}

    def on(world_size: int, *args: Any, **zero: Any) -> list[dict[str, Any]]:
        key = repr((world_size, args, zero))
        if key not in found:
            found[key] = ranks(world_size).run(traffic, *args, **zero)
        return found[key]

    return on


def of(records: list[tuple[str, int, torch.dtype]], dtype: torch.dtype, *names: str) -> list[int]:
    return [numel for name, numel, found in records if found == dtype and name in names]


@pytest.mark.parametrize(
    ("stage", "recipe", "num_history"),
    [
        (2, "tensorwise", 0),
        (3, "delayed", 2 * NUM_LAYERS),
    ],
)
def test_one_amax_reduce_a_step_carries_every_weight(seen: Any, stage: int, recipe: str, num_history: int) -> None:
    ours = seen(2, stage, {"linear": {"recipe": recipe}})[0]
    reduced = of(ours["records"], torch.float32, "all_reduce")
    # Beside the loss of our loop and the gradient norm.
    assert [numel for numel in reduced if numel > 1] == [NUM_LAYERS + num_history] and reduced.count(1) == 2
    assert ours["report"]["num_amax_reduces"] == 1


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [(1, 2), (2, 3)],
)
def test_gather_moves_one_byte_per_weight(seen: Any, stage: int, world_size: int) -> None:
    for ours in seen(world_size, stage, {}):
        num_weights = sum(ours["weights"].values())
        in_bytes = sum(of(ours["records"], torch.uint8, "all_gather", "broadcast"))
        assert 1.0 <= in_bytes / num_weights <= 1.02
        assert ours["report"]["gathered_fp8_bytes"] == in_bytes
        assert ours["report"]["gathered_bytes"] == ours["gather_bytes"]
    stock = seen(world_size, stage, None)[0]
    assert 1.99 <= stock["gather_bytes"] / stock["num_all"] <= 2.02
    assert not of(stock["records"], torch.uint8, "all_gather", "broadcast")


@pytest.mark.parametrize(
    ("threshold", "num_fetches"), [(0, 2), (100_000, 1)], ids=["forward and backward", "persistent"]
)
def test_every_fetch_of_stage_3_moves_one_byte_per_weight(ranks: Any, threshold: int, num_fetches: int) -> None:
    zero = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    zero["stage3_param_persistence_threshold"] = threshold
    for ours in ranks(2).run(traffic, 3, {}, **zero):
        num_weights, report = sum(ours["weights"].values()), ours["report"]
        num_others = ours["num_all"] - num_weights
        in_bytes = sum(of(ours["records"], torch.uint8, "all_gather"))
        assert 1.0 <= in_bytes / (num_fetches * num_weights) <= 1.02
        assert report["gathered_fp8_bytes"] == in_bytes
        assert report["gathered_bytes"] == ours["gather_bytes"]
        # A linear weight that travels in bf16 would show here.
        assert sum(of(ours["records"], torch.bfloat16, "all_gather")) <= (num_fetches + 0.1) * num_others
        if threshold:
            assert ours["persistent"] > NUM_LAYERS
            assert report["resident_persistent_bytes"] <= 1.02 * num_weights + 2.02 * num_others
    stock = ranks(2).run(traffic, 3, None, **zero)[0]
    assert 0.95 * num_fetches <= stock["gather_bytes"] / (2 * stock["num_all"]) <= 1.05 * num_fetches


# --- what DeepSpeed's comms_logger sees ---


def logged_and_reported(stage: int, reduce_scatter: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Bytes by collective that the logger has seen in one step, and the report of that step."""
    from deepspeed.comm.comm import comms_logger

    fp8 = {"zero": {"reduce_scatter": reduce_scatter}}
    block = {"enabled": True, "verbose": False, "prof_all": True}
    engine = training.build(training.ds_config(stage, fp8, comms_logger=block))
    comms_logger.comms_dict.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "MIN_BYTES", 0)  # so that some is sent past deepspeed.comm
            training.train(engine, 1)
        calls = comms_logger.get_raw_data()
    finally:
        comms_logger.enabled = False
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    report = engine.fp8_report() | {"parameters": parameters}
    training.destroy(engine)
    return {name: sum(size * found[0] for size, found in sizes.items()) for name, sizes in calls.items()}, report


def test_deepspeeds_comms_logger_sees_what_fp8_zero_moves(ranks: Any) -> None:
    for logged, report in ranks(2).run(logged_and_reported, 2, "fp8"):
        assert 2 * logged["all_gather_into_tensor"] == report["gathered_bytes"]  # it takes a gather's input
        assert logged["all_to_all_single"] == report["reduced_bytes"]
