"""A second engine in one process: not over the model of the first, but over what the first has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks

from fp8_ds.errors import ConfigError

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("stage", "second", "destroys"), [(2, {}, True), (3, None, False)])
@on_ranks(2)
def test_the_model_of_an_engine_is_refused_by_the_name_of_a_layer(
    stage: int, second: dict[str, Any] | None, destroys: bool
) -> None:
    import deepspeed

    engine = training.build(training.ds_config(stage, {}))
    training.train(engine, 1)
    net = engine.module
    if destroys:
        training.destroy(engine)
    with pytest.raises(ConfigError, match=r"^model: .*blocks\.0\.up"):
        deepspeed.initialize(
            model=net, config=training.ds_config(stage, second), model_parameters=list(net.parameters())
        )


@on_ranks(2)
def test_a_model_built_anew_goes_on_from_bf16_of_the_masters(folder: str) -> None:
    """The second starts from what the first has saved, as the refusal says."""
    import deepspeed

    config = training.ds_config(3, {}, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})
    engine = training.build(config)
    losses = training.train(engine, 3)
    masters = training.full_masters(engine)
    assert engine.save_16bit_model(folder)
    training.destroy(engine)
    torch.distributed.barrier()  # rank 0 writes, and others do not wait for it
    net = training.TinyLM()
    net.load_state_dict(torch.load(Path(folder, "pytorch_model.bin"), weights_only=True))
    engine = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
    assert all(torch.equal(p, masters[n].bfloat16().float()) for n, p in training.full_masters(engine).items())
    losses += training.train(engine, 3, 3)
    training.destroy(engine)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("stage", "has_block", "destroys"), [(1, False, False), (2, True, True), (3, False, True)])
@on_ranks(2)
def test_an_engine_without_an_optimizer_evaluates_the_model_of_another_as_it_is(
    stage: int, has_block: bool, destroys: bool
) -> None:
    import deepspeed

    fp8 = {"linear": {"recipe": "delayed"}, "optimizer": {"states": "fp8"}}
    engine = training.build(training.ds_config(stage, fp8))
    training.train(engine, 3)
    engine.eval()
    net, batches = engine.module, training.micro_batches(99, 2)
    with torch.no_grad():
        before = [float(engine(batch)) for batch in batches]
    weights = training.fp8_state(engine)
    if destroys:
        training.destroy(engine)
    config = training.ds_config(3 if stage == 3 else 0, fp8 if has_block else None)
    del config["optimizer"]
    if stage == 3:
        for module in net.modules():  # as Lightning does, for the hooks of the first would gather, too
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()
    again = deepspeed.initialize(model=net, config=config)[0]
    again.eval()
    with torch.no_grad():
        assert [float(again(batch)) for batch in batches] == before
    if not destroys:
        training.assert_fp8_equals(weights, training.fp8_state(engine))
        training.destroy(engine)
    training.destroy(again)


STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def uninstalled(stage: int, fp8: dict[str, Any], installs: bool, uninstalls: bool) -> dict[str, Any]:
    """Four steps; `fp8_ds.uninstall()` is called after two, and `install()` again at once where that is asked for."""
    import fp8_ds

    engine = training.build(training.ds_config(stage, fp8))
    result: dict[str, Any] = {"losses": training.train(engine, 2), "error": ""}
    before = training.fp8_state(engine), training.full_masters(engine)
    if uninstalls:
        fp8_ds.uninstall()
    if installs:
        fp8_ds.install()
    try:
        result["losses"] += training.train(engine, 2, first_step=2)
    except fp8_ds.UnsupportedError as error:
        result["error"] = str(error)
    finally:
        fp8_ds.install()
    after = training.fp8_state(engine), training.full_masters(engine)
    result["is_as_before"] = all(torch.equal(after[0][n][0], data) for n, (data, _) in before[0].items())
    result["is_as_before"] &= all(torch.equal(after[1][n], master) for n, master in before[1].items())
    training.destroy(engine)
    training.destroy(training.build(training.ds_config(stage, {})))  # the next engine patches again
    return result


@pytest.mark.parametrize(("stage", "installs"), [(1, False), (2, True)])
def test_a_step_of_zero_1_or_2_after_uninstall_is_refused_on_all_ranks_and_changes_nothing(
    ranks: Any, stage: int, installs: bool
) -> None:
    for result in ranks(2).run(uninstalled, stage, {}, installs, True):
        assert "fp8_ds.uninstall()" in result["error"] and "engine.destroy()" in result["error"]
        assert result["is_as_before"] and len(result["losses"]) == 2


@pytest.mark.parametrize(("stage", "fp8"), [(2, STATES), (3, {})])
def test_engines_that_need_no_patch_go_on_after_uninstall(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    plain = ranks(2).run(uninstalled, stage, fp8, False, False)
    for ours, left_alone in zip(ranks(2).run(uninstalled, stage, fp8, False, True), plain, strict=True):
        assert ours["losses"] == left_alone["losses"] and len(ours["losses"]) == 4 and not ours["error"]
