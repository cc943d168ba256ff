"""Recipe "delayed": histories of all ranks, and evaluation between and within steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}}


def history_of(engine: Any) -> dict[str, Any]:
    return dict(engine.fp8.history.state_dict())


def delayed_run(stage: int) -> dict[str, Any]:
    engine = training.build(training.ds_config(stage, DELAYED, gradient_accumulation_steps=2))
    losses = training.train(engine, 6)
    result = {"losses": losses, "history": history_of(engine), "state": training.fp8_state(engine)}
    result["masters"] = training.full_masters(engine)
    engine.eval()
    with torch.no_grad():
        engine(training.micro_batches(9, 1)[0] * 0 + torch.distributed.get_rank())
    result["after_eval"] = history_of(engine)
    training.destroy(engine)
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_delayed_histories_are_equal_on_all_ranks(ranks: Any, stage: int) -> None:
    results = ranks(2).run(delayed_run, stage)
    first = results[0]["history"]
    assert first["num_updates"] == 6
    rows = first["amax_history"][:6]
    assert bool((rows > 0).all()) and len({tuple(row.tolist()) for row in rows}) == 6
    for result in results:
        for key in ("amax_history", "scale", "scale_inv", "num_updates"):
            assert torch.equal(torch.as_tensor(result["history"][key]), torch.as_tensor(first[key])), key
            # Evaluation reads scales and records nothing, though every rank evaluated something else.
            assert torch.equal(torch.as_tensor(result["after_eval"][key]), torch.as_tensor(first[key])), key
        assert not result["after_eval"]["amax_local"].any()
        training.assert_fp8_follows_masters(result["state"], result["masters"])
    assert results[0]["losses"][-1] < 0.9 * results[0]["losses"][0]


def evaluate_with_gradients(engine: Any, step: int) -> None:
    """A batch in evaluation mode, not under `no_grad`, with inputs that no training has seen; each rank has another."""
    rank = torch.distributed.get_rank()
    handle = engine.module.blocks[0].up.register_forward_pre_hook(lambda _, inputs: (inputs[0] * (10 + rank),))
    engine.eval()
    engine(training.micro_batches(90 + step, 2)[rank])
    engine.train()
    handle.remove()


def run_with_evaluations(folder: str, evaluates: bool) -> dict[str, Any]:
    """Four steps, evaluated before, between and within them, with a save after two; and what goes on from that."""
    config, rank = training.ds_config(2, DELAYED, gradient_accumulation_steps=2), torch.distributed.get_rank()

    def go_on(engine: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, 4):
            if evaluates and step < 3:
                evaluate_with_gradients(engine, step)
            if evaluates and step == 2 and first == 0:
                engine.save_checkpoint(folder)
            for batch in training.micro_batches(step, 4)[2 * rank :][:2]:
                loss = engine(batch)
                if evaluates and step == 3:
                    evaluate_with_gradients(engine, step)  # and the backward's amaxes are kept
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
        return losses

    engine = training.build(config)
    result = {"losses": go_on(engine, 0), "history": history_of(engine)}
    training.destroy(engine)
    if evaluates:
        again = training.build(config, seed=1)
        again.load_checkpoint(folder)
        result["resumed"] = go_on(again, 2)
        training.destroy(again)
    return result


def test_an_evaluation_with_gradients_changes_no_bit_of_training(ranks: Any, tmp_path: Path) -> None:
    plain = ranks(2).run(run_with_evaluations, "", False)
    evaluated = ranks(2).run(run_with_evaluations, str(tmp_path), True)
    for ours, theirs in zip(evaluated, plain, strict=True):
        assert (ours["losses"], ours["resumed"]) == (theirs["losses"], theirs["losses"][4:])
        for key, value in theirs["history"].items():
            assert torch.equal(torch.as_tensor(ours["history"][key]), torch.as_tensor(value)), key


def run_in_evaluation_mode(in_evaluation_mode: bool) -> dict[str, Any]:
    engine = training.build(training.ds_config(2, DELAYED))
    engine.train(not in_evaluation_mode)
    result = {"losses": training.train(engine, 3), "history": history_of(engine)}
    training.destroy(engine)
    return result


def test_a_model_may_train_in_evaluation_mode(ranks: Any) -> None:
    """As one from `from_pretrained` does until `train()` is called; it has no dropout."""
    ours, theirs = (ranks(2).run(run_in_evaluation_mode, one)[0] for one in (True, False))
    assert ours["losses"] == theirs["losses"]
    assert torch.equal(ours["history"]["amax_history"], theirs["history"]["amax_history"])
