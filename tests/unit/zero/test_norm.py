"""Norm, clip factor, flag of a skipped step, and the check of hyperparameters, on ranks that are threads."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from torch import nn

from fp8_ds.comm.host_copy import OverflowFlag
from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import ConfigError
from fp8_ds.numerics.masters import E4M11
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import allocate_lo
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.zero.norm import HyperparameterCheck, clip_factor, global_norm, overflow_flag


@pytest.mark.parametrize("loss_scale", [1.0, 4.0])
def test_a_gradient_is_clipped_to_its_norm_and_a_small_one_is_left(loss_scale: float) -> None:
    for norm, expected in ((8.0, 0.25), (2.0, 1.0), (0.5, 1.0), (0.0, 1.0)):
        factor = clip_factor(torch.tensor(norm * loss_scale), 2.0, loss_scale)
        assert float(factor) == pytest.approx(expected / loss_scale, rel=1e-5)
    assert float(clip_factor(torch.tensor(8.0), 0.0, loss_scale)) == 1 / loss_scale


@pytest.mark.parametrize(("norm", "is_skipped"), [(3.0, 0), (0.0, 0), (math.inf, 1), (math.nan, 1)])
def test_a_step_is_skipped_if_its_norm_is_not_finite(norm: float, is_skipped: int) -> None:
    flag = OverflowFlag()
    sent = overflow_flag(torch.tensor(norm))
    assert sent.dtype == torch.int32 and int(sent) == is_skipped
    flag.send(sent)
    assert flag.resolve(wait=True) is bool(is_skipped) and flag.is_current
    assert not flag.late()


def test_a_late_flag_of_a_checkpoint_is_told_once() -> None:
    flag = OverflowFlag()
    flag.load(True)
    assert flag.late() and flag.resolve(wait=False) is False  # that of the step before, and none was sent
    assert flag.resolve(wait=True) is True and flag.resolve(wait=True) is False


def core_of(lr: float) -> AdamCore:
    device = torch.device("cpu")
    shard = AdamShard("weight", 8, 0, 0, 0, 0, E4M11, torch.zeros(8, dtype=torch.uint8))
    allocate_lo(shard, device)
    return AdamCore([FlatBuffer(0, 8, [(ShardRange(0, 8), shard)])], [0], PredictedScales(1, device), device, True, 0)


def groups_of(lr: float) -> list[dict[str, Any]]:
    return [{"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]


def norm_of(rates: list[float], model_parallel_rank: int) -> tuple[float, str]:
    """Norm over all ranks of gradients of magnitude 1, and what the end of the step raises."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.zeros(4)) for _ in range(4)]
    params[1].ds_pipe_replicated = True  # type: ignore[attr-defined]
    params[2].model_parallel = True  # type: ignore[attr-defined]
    grads = [torch.ones(4), torch.full((4,), 100.0), torch.ones(4), torch.ones(0)]
    groups, check = groups_of(rates[rank]), HyperparameterCheck(core_of(rates[rank]), dist.group.WORLD)
    optimizer: Any = SimpleNamespace(
        model_parallel_rank=model_parallel_rank,
        param_groups=groups,
        _model_parallel_all_reduce=lambda tensor, op: None,
    )
    norm = global_norm(optimizer, grads, params, lambda counted: torch.cat(counted).square().sum(), check)
    try:
        check.end_step(groups, overflow=not bool(norm.isfinite()))
    except ConfigError as error:
        return float(norm), str(error)
    return float(norm), ""


def test_every_element_counts_once_and_replicas_do_not() -> None:
    assert on_threads(3, norm_of, [1e-3] * 3, 0) == [(pytest.approx(24**0.5), "")] * 3
    assert (
        on_threads(3, norm_of, [1e-3] * 3, 1) == [(pytest.approx(12**0.5), "")] * 3
    )  # what all of them hold is rank 0's


def test_no_rank_steps_if_one_has_a_learning_rate_of_its_own() -> None:
    found = on_threads(3, norm_of, [1e-3, 1e-3, 2e-3], 0)
    for norm, error in found:
        assert math.isnan(norm) and "param_groups: expected the same lr" in error


def differ_late() -> None:
    """The host learns of a skipped step in the next one, in which ranks are alike again."""
    check, own = HyperparameterCheck(core_of(1e-3), dist.group.WORLD), groups_of(1e-3 * (1 + dist.get_rank()))
    assert bool(check.sum(torch.ones(1), own).isnan())
    check.end_step(own, overflow=False)
    assert float(check.sum(torch.ones(1), groups_of(1e-3))) == 2.0
    with pytest.raises(ConfigError, match="param_groups"):
        check.end_step(groups_of(1e-3), overflow=True)
    check.sum(torch.ones(1), groups_of(1e-3))
    check.end_step(groups_of(1e-3), overflow=True)  # of a gradient


def test_a_step_that_ranks_differed_in_is_named_though_its_flag_comes_late() -> None:
    on_threads(2, differ_late)
