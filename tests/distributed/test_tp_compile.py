"""Tensor-parallel layers under torch.compile: one graph with the collectives and the bits of eager."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tensor_parallel as tpar
import test_tp_llama as base
import torch
import training
from torch import Tensor, nn

from fp8_ds.config import TensorParallelConfig
from fp8_ds.nn.fused.mlp import FusedSwiglu, SwigluNames
from fp8_ds.nn.fused.module import Producer
from fp8_ds.nn.fused.search import find_swiglu
from fp8_ds.testing import assert_bitwise
from fp8_ds.tp import LLAMA, TensorParallel, configure, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")


def in_products(model: base.Llama) -> base.Llama:
    """With attention as products and a softmax: of SDPA transformers traces another call than it makes in eager, whose
    gradients have other last bits with torch 2.11."""
    model.model.config._attn_implementation = "eager"
    return model


def sharded_model(settings: dict[str, Any]) -> tuple[nn.Module, TensorParallel]:
    """A Llama of one layer over two ranks, in FP8, its MLP fused if `settings` say what it keeps."""
    model = in_products(base.llama(torch.bfloat16, num_layers=1))
    settings = dict(settings)
    nonlinear = settings.pop("nonlinear", None)
    tp = parallelize(model, LLAMA, tpar.groups(2).tp_group)
    configure(model, TensorParallelConfig(**settings), "tensorwise")
    base.to_fp8(model)
    if nonlinear is not None:  # not the norms, which run stock code in a graph
        for layer in model.model.model.layers:
            parts = find_swiglu(layer.mlp)
            assert isinstance(parts, SwigluNames)
            FusedSwiglu.fuse(layer.mlp, parts, Producer((layer.mlp.down_proj,), nonlinear))
    return model, tp


def loss_and_gradients(model: nn.Module, run: Any, step: int) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = run(training.micro_batches(step, 1)[0])
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert_bitwise(found[1][name], grad)


def counting(counts: dict[str, Counter[str]]) -> Any:
    """A backend that runs the graphs of forward and backward as they are, and counts their collectives."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def of(kind: str) -> Any:
        def compiler(graph: Any, example_inputs: Any) -> Any:
            names = (str(node.target) for node in graph.graph.nodes)
            counts[kind].update(name.split(".")[1] for name in names if name.startswith("_c10d_functional"))
            return make_boxed_func(graph.forward)

        return compiler

    counts.update(forward=Counter(), backward=Counter())
    return aot_autograd(
        fw_compiler=of("forward"), bw_compiler=of("backward"), partition_fn=min_cut_rematerialization_partition
    )


def as_one_graph(settings: dict[str, Any]) -> dict[str, Any]:
    model, tp = sharded_model(settings)
    eager = [loss_and_gradients(model, model, step) for step in range(2)]
    torch._dynamo.reset()
    counts: dict[str, Counter[str]] = {}
    run = torch.compile(model, backend=counting(counts), fullgraph=True)
    compiled = [loss_and_gradients(model, run, step) for step in range(2)]
    assert tp.inputs.traced is None  # nothing of the graph is kept
    return {"eager": eager, "compiled": compiled, "counts": counts}


@pytest.mark.parametrize("settings", [{}, pytest.param({"nonlinear": "fp8"}, marks=pytest.mark.slow)], ids=str)
def test_a_model_is_one_graph_with_the_bits_and_the_collectives_of_eager(ranks: Any, settings: dict[str, Any]) -> None:
    for result in ranks(2).run(as_one_graph, settings):
        for found, expected in zip(result["compiled"], result["eager"], strict=True):
            assert_same(found, expected)
        for counts in result["counts"].values():
            del counts["wait_tensor"]
        # Two blocks, and the borders: tokens are gathered behind the last layer, gradients before the first.
        each_way = {"all_gather_into_tensor_coalesced": 2 + 1, "reduce_scatter_tensor": 2}
        assert result["counts"] == {"forward": each_way, "backward": each_way}


def in_an_engine(stage: int, backend: str | None) -> Any:
    engine = base.tp_engine(training.ds_config(stage, {}), 2, num_layers=1)
    in_products(engine.module)
    if backend is not None:
        torch._dynamo.reset()
        engine.compile(backend=backend)
    losses, norms = base.train(engine, 2, 4)
    state = training.fp8_state(engine)
    base.destroy(engine)
    return losses, norms, state


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2])
def test_a_compiled_engine_trains_to_the_bits_of_eager(ranks: Any, stage: int) -> None:
    eager, compiled = ranks(2).run(in_an_engine, stage, None), ranks(2).run(in_an_engine, stage, "aot_eager")
    for (losses, norms, state), expected in zip(compiled, eager, strict=True):
        assert losses == expected[0] and norms == expected[1]
        training.assert_fp8_equals(state, expected[2])
