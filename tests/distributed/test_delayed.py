"""Recipe "delayed": histories of all ranks, and evaluation between and within steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}}


def history_of(engine: Any) -> dict[str, Any]:
    return dict(engine.fp8.history.state_dict())


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
    training.assert_fp8_follows_masters(training.fp8_state(engine), training.full_masters(engine))
    training.destroy(engine)
    if evaluates:
        again = training.build(config, seed=1)
        again.load_checkpoint(folder)
        result["resumed"] = go_on(again, 2)
        training.destroy(again)
    return result


def test_histories_are_equal_on_all_ranks_and_an_evaluation_with_gradients_changes_no_bit(
    ranks: Any, tmp_path: Path
) -> None:
    plain = ranks(2).run(run_with_evaluations, "", False)
    evaluated = ranks(2).run(run_with_evaluations, str(tmp_path), True)
    for ours, theirs in zip(evaluated, plain, strict=True):
        assert (ours["losses"], ours["resumed"]) == (theirs["losses"], theirs["losses"][4:])
        for key, value in theirs["history"].items():
            assert torch.equal(torch.as_tensor(ours["history"][key]), torch.as_tensor(value)), key
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(plain[0]["history"][key])), key
        rows = theirs["history"]["amax_history"][:4]
        assert theirs["history"]["num_updates"] == len({tuple(row.tolist()) for row in rows}) == 4 and bool(
            (rows > 0).all()
        )


@on_ranks(2)
def test_a_model_may_train_in_evaluation_mode() -> None:
    """As one from `from_pretrained` does until `train()` is called; it has no dropout."""
    found = []
    for is_training in (True, False):
        engine = training.build(training.ds_config(2, DELAYED))
        engine.train(is_training)
        found.append((training.train(engine, 3), history_of(engine)["amax_history"].tolist()))
        training.destroy(engine)
    assert found[0] == found[1]
