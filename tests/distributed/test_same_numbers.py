"""Ranks step with the same learning rate and the like, or none does: scales of split masters follow from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks

pytestmark = pytest.mark.distributed


def of_its_own(stage: int, optimizer: dict[str, Any], number: dict[str, Any], overrides: dict[str, Any]) -> str:
    """What all ranks raise in a step that rank 1 would take with a number of its own, which leaves everything as it is.

    "": they have taken it.
    """
    from fp8_ds.errors import ConfigError

    fp8 = {"optimizer": {"states": "fp8", **optimizer}}
    engine = training.build(training.ds_config(stage, fp8, **overrides))
    training.train(engine, 1)
    masters, weights = training.full_masters(engine), training.fp8_state(engine)
    if dist.get_rank() == 1:
        engine.optimizer.param_groups[0].update(number)
    try:
        for step in range(1, 4):
            training.train(engine, 1, step)
        message = ""
    except ConfigError as error:
        message = str(error)
        training.assert_fp8_equals(training.fp8_state(engine), weights)
        for name, master in training.full_masters(engine).items():
            assert torch.equal(master, masters[name]), name
    training.destroy(engine)
    return message


SPLIT, RELEASE = {"master": "e4m19"}, {"master": "e4m11", "release": True}
CASES = [
    (3, SPLIT, {"weight_decay": 0.0}, {}),
    (2, SPLIT, {"betas": (0.8, 0.999)}, {"bf16": {"check_grad_overflow": False}}),
    (2, RELEASE, {"lr": 1e-3}, {"gradient_clipping": 0.0}),
    (3, RELEASE, {"lr": 1e-3}, {"gradient_clipping": 0.0}),
]


@pytest.mark.parametrize(("stage", "optimizer", "number", "overrides"), CASES)
def test_a_step_with_another_number_on_one_rank_changes_nothing_and_is_an_error_on_all(
    ranks: Any, stage: int, optimizer: dict[str, Any], number: dict[str, Any], overrides: dict[str, Any]
) -> None:
    for rank, message in enumerate(ranks(2).run(of_its_own, stage, optimizer, number, overrides)):
        assert "expected the same lr, betas, eps and weight_decay on all ranks" in message
        assert f"on rank {rank} and others elsewhere. No weight was changed" in message


ALMOST_THE_SAME = math.nextafter(3e-3, 1.0)


def test_a_last_bit_of_float64_is_no_error(ranks: Any) -> None:
    assert ranks(2).run(of_its_own, 2, SPLIT, {"lr": ALMOST_THE_SAME}, {}) == ["", ""]


SEVERAL_BUCKETS = {"master": "e4m11", "release": True}


@pytest.mark.parametrize(("stage", "optimizer"), [(2, SPLIT), (2, SEVERAL_BUCKETS), (3, SEVERAL_BUCKETS)])
@on_ranks(2)
def test_a_difference_of_one_step_is_an_error_where_the_host_learns_of_it_late_whatever_the_buckets(
    stage: int, optimizer: dict[str, Any]
) -> None:
    from fp8_ds.errors import ConfigError

    fp8, late = {"optimizer": {"states": "fp8", **optimizer}}, {"bf16": {"check_grad_overflow": False}}
    model = {"width": 64, "hidden": 192, "num_blocks": 3}
    buckets = {"zero_optimization": {"reduce_bucket_size": 16_000}}
    engine = training.build(training.ds_config(stage, fp8, gradient_clipping=0.0, **late, **buckets), model)
    engine.optimizer.fp8_flag = training.late_flag()
    group = engine.optimizer.param_groups[0]
    usual = group["lr"]
    training.train(engine, 1)
    masters = training.full_masters(engine)
    group["lr"] = usual / (1 + dist.get_rank())
    training.train(engine, 1, 1)
    for name, master in training.full_masters(engine).items():
        assert torch.equal(master, masters[name]), name
    group["lr"] = usual
    with pytest.raises(ConfigError, match="expected the same lr, betas, eps and weight_decay on all ranks"):
        training.train(engine, 1, 2)
    training.destroy(engine)
