"""engine.compile() on a GPU: tables of rotary embeddings are kept, and steps replay as CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import test_compile
import torch
import training
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

STEPS = 12
"""Two graphs are made with delayed scales; each runs once to warm up and once to be recorded."""


def compiled_steps(engine: Any, mode: str | None, num_micro_batches: int, forward: Any) -> dict[str, Any]:
    """Losses, and of the last step: what the host launched, and how many graphs could not be replayed."""
    torch._dynamo.reset()
    counters.clear()
    engine.compile(compile_kwargs={"mode": mode} if mode else {})
    losses, names = [], []
    for step in range(STEPS):
        batches = [one.to(engine.device) for one in training.micro_batches(step, num_micro_batches)]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as prof:
            for batch in batches:
                loss = forward(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
        names = [event.name for event in prof.events()]
    found = {
        "losses": losses,
        "skips": counters["inductor"]["cudagraph_skips"],
        "replays": sum(name == "cudaGraphLaunch" for name in names),
        "tables": sum(name == "fp8_ds::table" for name in names),
        "casts": sum(name.startswith("fp8_ds::quantize") for name in names),
    }
    training.destroy(engine)
    return found


def language_model(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
    return loss


def both_ways(fp8: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        compiled_steps(test_compile.build(2, fp8, num_layers=2), mode, 1, language_model)
        for mode in (None, "reduce-overhead")
    ]


def accumulated() -> list[dict[str, Any]]:
    config = training.ds_config(2, test_compile.STATES, gradient_accumulation_steps=2)
    return [
        compiled_steps(training.build(config), mode, 2, lambda engine, batch: engine(batch))
        for mode in (None, "reduce-overhead")
    ]


def check(plain: dict[str, Any], replayed: dict[str, Any]) -> None:
    assert plain["skips"] == replayed["skips"] == 0
    assert plain["replays"] == 0 < replayed["replays"]
    assert replayed["casts"] == 0 < plain["casts"], "the host launches no cast by itself"
    # The same kernels, but for sums whose order is not fixed.
    assert replayed["losses"] == pytest.approx(plain["losses"], rel=2e-2)
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_steps_are_replayed_as_cuda_graphs(gpu_ranks: Any, recipe: str) -> None:
    fp8 = {"linear": {"recipe": recipe}, **test_compile.FUSED, **test_compile.STATES}
    ((plain, replayed),) = gpu_ranks(1).run(both_ways, fp8)
    check(plain, replayed)
    assert plain["tables"] == 2, "cosines and sines, once a step"


def test_accumulated_gradients_of_replayed_graphs_are_those_of_plain_ones(gpu_ranks: Any) -> None:
    ((plain, replayed),) = gpu_ranks(1).run(accumulated)
    check(plain, replayed)
