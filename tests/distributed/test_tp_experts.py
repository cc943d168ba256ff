"""Experts in tensor-parallel models: attention is cut, and they are whole on every rank, on its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import training
from test_experts import MoeLM
from test_tp_llama import destroy, engine_config, to_fp8, whole

from fp8_ds.testing import sqnr_db
from fp8_ds.tp import LLAMA, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers.integrations.moe")

MIXTRAL = replace(
    LLAMA,
    column=(),
    row=(),
    blocks=("*layers.*.self_attn",),
    in_shards=(*LLAMA.in_shards, "*layers.*.mlp"),
)


def model() -> MoeLM:
    torch.manual_seed(0)
    return MoeLM("mixtral", False)


def gradients(sequence_parallel: bool, fp8: bool) -> dict[str, float]:
    """SQNR of the loss and all gradients to those of the whole model, both in FP8 if `fp8`."""
    reference, cut = model(), model()
    tp = parallelize(cut, MIXTRAL, tpar.groups(dist.get_world_size()).tp_group, sequence_parallel=sequence_parallel)
    losses = []
    for one in (reference, cut):
        if fp8:
            to_fp8(one)
        losses.append(one(training.micro_batches(0, 1)[0][:, :-1]))
        losses[-1].backward()
    found = {"loss": sqnr_db(losses[0], losses[1])}
    for name, p in reference.named_parameters():
        found[name] = sqnr_db(p.grad, whole(cut, name, cut.get_parameter(name).grad, tp))
    return found


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_experts_named_among_what_reads_tokens_have_the_gradients_of_the_whole_model(
    ranks: Any, sequence_parallel: bool
) -> None:
    for found in ranks(2).run(gradients, sequence_parallel, False):
        assert sum("experts" in name for name in found) == 4 and min(found.values()) > 85, found


def test_in_fp8_they_do_too(ranks: Any) -> None:
    for found in ranks(2).run(gradients, True, True):
        assert found["loss"] > 40, found
        # Two roundings of everything, and a token here and there that other experts get; 3 dB were half of a gradient.
        assert min(value for name, value in found.items() if "experts" in name) > 10, found


def trained(tp_size: int, num_steps: int) -> dict[str, Any]:
    """Losses of a run in stage 2, and the experts' bytes at its end."""
    import deepspeed

    import fp8_ds  # noqa: F401

    groups, net = tpar.groups(tp_size), model()
    if tp_size > 1:
        parallelize(net, MIXTRAL, groups.tp_group)
    config = engine_config(2, {}, tp_size)
    options = {"mpu": groups} if tp_size > 1 else {}
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters(), **options)[0]
    losses = []
    for step in range(num_steps):
        loss = engine(training.micro_batches(step, 1)[0][:, :-1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: pair for name, pair in training.fp8_state(engine).items() if "experts" in name}
    destroy(engine)
    return {"losses": losses, "state": state}


def test_under_the_engine_they_stay_the_same_on_all_ranks_and_train_as_in_the_whole_model(ranks: Any) -> None:
    one = ranks(1).run(trained, 1, 4)[0]
    two = ranks(2).run(trained, 2, 4)
    assert len(two[0]["state"]) == 4
    training.assert_fp8_equals(two[0]["state"], two[1]["state"])
    assert two[0]["losses"] == pytest.approx(one["losses"], abs=0.02)
    assert two[0]["losses"][-1] < two[0]["losses"][0] - 0.1
