"""What users write into FP8 weights with split masters loses nothing that they did not change, and fits every rank."""

from __future__ import annotations

from typing import Any

import pytest
import test_states as base
import torch
import torch.distributed as dist
import training
from torch import Tensor

pytestmark = pytest.mark.distributed

NAME = "blocks.0.up.weight"


def build(stage: int, master: str) -> Any:
    rate = {"params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
    return training.build(
        training.ds_config(stage, base.states(master), optimizer=rate, gradient_clipping=0.0), base.SMALL
    )


def parameter(engine: Any) -> Any:
    return dict(engine.module.named_parameters())[NAME]


# --- unchanged elements ---


def write_back(stage: int, master: str, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All bytes before and after every weight was written with what was read."""
    import deepspeed

    engine = build(stage, master)
    training.train(engine, 3)
    if how == "in bf16":
        engine.optimizer.fp8_set_bf16({NAME})
    before = base.everything(engine)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=stage == 3), torch.no_grad():
        if how == "load_state_dict":
            engine.module.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
        else:
            for p in params:
                p.copy_(p.detach().clone())
    after = base.everything(engine)
    if how == "in bf16":
        assert parameter(engine)._fp8.hp is not None
    training.destroy(engine)
    return before, after


@pytest.mark.parametrize(
    ("stage", "master", "how"),
    [
        (1, "e4m19", "copy"),
        (2, "e4m11", "load_state_dict"),
        (2, "e4m19", "in bf16"),
        (3, "e4m11", "copy"),
    ],
)
def test_what_is_written_back_as_it_was_read_changes_no_byte(ranks: Any, stage: int, master: str, how: str) -> None:
    for before, after in ranks(2).run(write_back, stage, master, how):
        if stage == 3:  # its scales fit the masters anew; the bytes then differ where the last step's was wider
            base.assert_same_states(after["masters"], before["masters"])
        else:
            base.assert_same_everything(after, before)


def write_a_row(stage: int, master: str, factor: float) -> dict[str, Any]:
    engine = build(stage, master)
    training.train(engine, 3)
    p, before = parameter(engine), training.full_masters(engine)[NAME]
    row = factor * float(p.detach().abs().max()) * torch.linspace(-1, 1, p.shape[1])
    with torch.no_grad():
        p[3] = row
    result = {"before": before, "after": training.full_masters(engine)[NAME], "row": row.bfloat16().float()}
    result["bytes"], result["masters"] = training.fp8_state(engine), training.full_masters(engine)
    training.destroy(engine)
    return result


@pytest.mark.parametrize(("stage", "master", "factor"), [(1, "e4m11", 1.0), (2, "e4m19", 8.0)])
def test_elements_that_a_write_leaves_as_they_were_keep_their_masters_on_every_rank(
    ranks: Any, stage: int, master: str, factor: float
) -> None:
    results = ranks(2).run(write_a_row, stage, master, factor)
    for result in results:
        training.assert_fp8_equals(result["bytes"], results[0]["bytes"])
        base.assert_bytes_are_high_parts(result["bytes"], result["masters"], master)
        before, after, scale_inv = result["before"], result["after"], result["bytes"][NAME][1]
        others = torch.arange(len(before)) != 3
        held = before[others].abs() >= (9 * 2.0**-9 * scale_inv if factor > 1 else 0)  # below are FP8's subnormals
        assert torch.equal(after[others][held], before[others][held])
        assert float(held.float().mean()) > 0.8
        assert torch.allclose(after[3], result["row"], rtol=2.0**-11, atol=2.0**-20)


# --- parts of this rank ---


def set_local(value_of_limit: float) -> dict[str, Any]:
    """Rank 1 writes one value, as a share of the weight's largest; the step before has widened the scale."""
    from deepspeed import utils

    from fp8_ds.errors import UnsupportedError

    engine = build(3, "e4m11")
    p, scales = parameter(engine), engine.optimizer.optimizer.core.scales
    full = utils.safe_get_full_fp32_param(p)
    full *= 0.3 / full.abs().max()
    full.view(-1)[0] = 0.434  # of .4375, where the next power of two begins
    utils.safe_set_full_fp32_param(p, full)
    index = engine.optimizer._fp8_shard_of[id(p)].scale_index
    narrow = float(scales.scale_inv[index])
    for group in engine.optimizer.param_groups:
        group["lr"] = 6e-3
    training.train(engine, 1)
    scales.wait()
    limit, widened = float(scales.amax[index]), float(scales.scale_inv[index])
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-5
    value = utils.safe_get_local_fp32_param(p).clone()
    result: dict[str, Any] = {"limit": limit, "holds": 448 * widened, "factor": widened / narrow}
    if dist.get_rank() == 1:
        value[5] = value_of_limit * limit
    try:
        utils.safe_set_local_fp32_param(p, value)
    except UnsupportedError as error:
        result["error"] = str(error)
    result["before"] = utils.safe_get_local_fp32_param(p).clone()
    training.train(engine, 1, first_step=1)
    result["after"] = utils.safe_get_local_fp32_param(p).clone()
    result["shared"] = base.shared_states(engine)
    training.destroy(engine)
    return result


@pytest.mark.parametrize("share", [1.0, -0.999, 1.01])
def test_a_local_value_is_taken_if_the_scale_that_ranks_share_holds_it_for_good(ranks: Any, share: float) -> None:
    first, second = ranks(2).run(set_local, share)
    assert first["factor"] == 2 and 1.01 * first["limit"] < first["holds"]
    assert "error" not in first
    for key, value in first["shared"].items():
        assert torch.equal(value, second["shared"][key]), key
    if abs(share) > 1:
        number = f"{float(torch.tensor(share * first['limit'])):.8g}"
        for part in (NAME, f"up to {first['limit']:.8g}", f"got {number}", "safe_set_full_fp32_param on all ranks"):
            assert part in second["error"], part
        return
    assert "error" not in second
    assert float(second["before"][5]) == pytest.approx(share * first["limit"], rel=2.0**-12)
    for result in (first, second):
        assert largest_move(result) <= 2.0**-13  # one last bit of the largest masters


def largest_move(result: dict[str, Any]) -> float:
    moved: Tensor = result["after"] - result["before"]
    return float(moved.abs().max())


# --- in stage 3, while weights are gathered ---


def set_while_gathered() -> list[float]:
    """Losses after `safe_set_full_fp32_param` has given a gathered weight another scale, and after a step at rate 0."""
    from deepspeed import utils

    rate = {"params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}}
    zero = {"stage3_param_persistence_threshold": 100_000}
    engine = training.build(training.ds_config(3, base.states("e4m19"), optimizer=rate, zero_optimization=zero))
    losses = training.train(engine, 1)
    for block in engine.module.blocks:
        value = utils.safe_get_full_fp32_param(block.down.weight).clone()
        value.view(-1)[0] *= 1e3
        assert block.down.weight._fp8.data is not None
        utils.safe_set_full_fp32_param(block.down.weight, value)
    for step in (1, 1):
        losses += training.train(engine, 1, first_step=step)
    training.destroy(engine)
    return losses


def test_a_gathered_weight_reads_as_it_was_set(ranks: Any) -> None:
    for _, after_set, after_step in ranks(2).run(set_while_gathered):
        assert after_set == after_step
